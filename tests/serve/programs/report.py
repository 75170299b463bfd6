"""What the programs of this folder share: each runs one client against a server, and prints a line for each feature.

EAGLE_URL: the server's address. A line is JSON: the feature, and null or why it failed.
"""

import json
import os
import traceback
from collections.abc import Callable

URL = os.environ["EAGLE_URL"]
MODEL = os.environ.get("EAGLE_MODEL", "x-int4")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
ASK = [{"role": "user", "content": "Say hello in five words."}]
WEATHER = [{"role": "user", "content": "What will the weather be in Rome for 3 days? Use the tool."}]


def fits(arguments: object) -> bool:
    """Whether arguments, or their JSON text, follow the schema."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return isinstance(given, dict) and given["city"] in ("Rome", "Oslo") and given["days"] in (1, 3) and len(given) == 2


def report(features: dict[str, Callable[[], object]]) -> None:
    """Run each feature, which returns whether its answer is right or raises."""
    for name, feature in features.items():
        try:
            problem = None if feature() else "the answer is wrong"
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps({"feature": name, "problem": problem}), flush=True)


def refused(call: Callable[[], object], *words: str) -> bool:
    """Whether a call raises an error whose text has all the words."""
    try:
        call()
    except Exception as error:
        return all(word in str(error) for word in words)
    return False
