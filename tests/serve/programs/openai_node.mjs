// OpenAI's client for Node.
import OpenAI from "openai";

const URL = process.env.EAGLE_URL, MODEL = process.env.EAGLE_MODEL ?? "x-int4";
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const SCHEMA = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] }, days: { enum: [1, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const FUNCTION = { name: "weather", description: "Tells the weather.", parameters: SCHEMA };
const ASK = [{ role: "user", content: "Say hello in five words." }];
const TOOLS = {
  model: MODEL, temperature: 0, tool_choice: "required", tools: [{ type: "function", function: FUNCTION }],
  messages: [{ role: "user", content: "What will the weather be in Rome for 3 days? Use the tool." }],
};
const fits = (text) => ["Rome", "Oslo"].includes(JSON.parse(text).city) && [1, 3].includes(JSON.parse(text).days);
const chat = (more) => client.chat.completions.create({ model: MODEL, messages: ASK, ...more });
const refused = (promise, word) => promise.then(() => false, (error) => String(error.message).includes(word));

const features = {
  chat: async () => (await chat({})).choices[0].message.content,
  stream: async () => {
    let said = "";
    for await (const chunk of await chat({ stream: true })) said += chunk.choices[0]?.delta?.content ?? "";
    return said;
  },
  stop: async () => {
    const said = (await chat({ temperature: 0, max_tokens: 40 })).choices[0].message.content;
    const stop = said.slice(3, 6);
    const cut = (await chat({ temperature: 0, max_tokens: 40, stop })).choices[0].message.content;
    return cut === said.slice(0, said.indexOf(stop));
  },
  tools: async () => fits((await client.chat.completions.create(TOOLS)).choices[0].message.tool_calls[0].function.arguments),
  "tools streamed": async () => {
    const runner = client.chat.completions.stream(TOOLS);
    return fits((await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments);
  },
  "JSON schema": async () => {
    const form = { type: "json_schema", json_schema: { name: "place", schema: SCHEMA, strict: true } };
    return fits((await chat({ response_format: form })).choices[0].message.content);
  },
  responses: async () => (await client.responses.create({ model: MODEL, input: "Say hello." })).output_text,
  "responses streamed": async () => {
    let said = "", last;
    for await (last of await client.responses.create({ model: MODEL, input: "Hello.", stream: true }))
      if (last.type === "response.output_text.delta") said += last.delta;
    return last.type === "response.completed" && said;
  },
  "responses, tools": async () => {
    const { tools, messages, ...rest } = TOOLS;
    const asked = { ...rest, input: messages, tools: [{ type: "function", strict: true, ...FUNCTION }] };
    return fits((await client.responses.create(asked)).output[0].arguments);
  },
  completions: async () => (await client.completions.create({ model: MODEL, prompt: "One, two,", max_tokens: 8 })).choices[0].text,
  "embeddings refused": () => refused(client.embeddings.create({ model: MODEL, input: "x" }), "embeddings"),
  "model list": async () => (await client.models.list()).data.some((model) => model.id === MODEL),
  errors: () => refused(chat({ temperature: -1 }), "temperature"),
};
for (const [feature, run] of Object.entries(features)) {
  let problem = null;
  try {
    if (!(await run())) problem = "the answer is wrong";
  } catch (error) {
    problem = String(error.stack);
  }
  console.log(JSON.stringify({ feature, problem }));
}
