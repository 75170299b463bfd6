// Runs recorded graphs of the native operators in an ONNX Runtime and compares the outputs' bits: for systems that have no
// Python here, such as Windows' libraries under wine.
//
//   replay ONNXRUNTIME KERNELS CASES      two shared libraries and a file that tests/recorded_graphs.py writes
//
// Prints the instruction set and how many cases have other bits; exits with 0 if none has, 1 if some have, 2 on an error.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#include <windows.h>
static void* opened(const char* path) { return (void*)LoadLibraryA(path); }
static void* symbol(void* library, const char* name) { return (void*)GetProcAddress((HMODULE)library, name); }
#else
#include <dlfcn.h>
static void* opened(const char* path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static void* symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

typedef void* Status;
typedef void (*Function)(void);
typedef struct { const Function* (*get_api)(uint32_t); const char* (*version)(void); } Base;
enum { MESSAGE = 2, ENV = 3, SESSION = 8, RUN = 9, OPTIONS = 10, THREADS = 24, TENSOR = 49, DATA = 51, CPU_MEMORY = 69 };
enum { RELEASE_SESSION = 95, RELEASE_VALUE = 96, RELEASE_OPTIONS = 100, MOST = 16 };

static const Function* api;

static void fail(const char* what, const char* why) {
  fprintf(stderr, "replay: %s: %s\n", what, why);
  exit(2);
}
static void check(const char* what, Status status) {
  if (status) fail(what, ((const char* (*)(Status))api[MESSAGE])(status));
}

typedef struct { const char *at, *end; } Bytes;
static const void* take(Bytes* from, uint64_t count) {
  if ((uint64_t)(from->end - from->at) < count) fail("the cases", "the file ends early");
  const void* here = from->at;
  from->at += count;
  return here;
}
static uint64_t number(Bytes* from) {
  uint64_t value;
  memcpy(&value, take(from, 8), 8);
  return value;
}

static int wrong_bits(Bytes* from, void* env, void* options, void* memory) {
  const char *names[MOST], *outputs[MOST];
  void *values[MOST] = {0}, *results[MOST] = {0}, *session = NULL;
  const uint64_t size = number(from);
  const void* model = take(from, size);
  check("a session", ((Status(*)(void*, const void*, size_t, void*, void**))api[SESSION])(env, model, size, options, &session));
  const uint64_t count = number(from);
  if (count > MOST) fail("the cases", "too many inputs");
  for (uint64_t i = 0; i < count; i++) {
    names[i] = take(from, 16);
    const uint64_t type = number(from), rank = number(from), length = number(from);
    const int64_t* shape = take(from, 8 * rank);
    int64_t dims[8];
    memcpy(dims, shape, 8 * rank);
    char* data = malloc(length + 64);  // of its own: the file's bytes may lie anywhere
    memcpy(data, take(from, length), length);
    check("an input", ((Status(*)(void*, void*, size_t, const int64_t*, size_t, int, void**))api[TENSOR])(
                          memory, data, length, dims, rank, (int)type, &values[i]));
  }
  const uint64_t wanted = number(from);
  const char* expected[MOST];
  uint64_t lengths[MOST];
  if (wanted > MOST) fail("the cases", "too many outputs");
  for (uint64_t i = 0; i < wanted; i++) {
    outputs[i] = take(from, 16);
    lengths[i] = number(from);
    expected[i] = take(from, lengths[i]);
  }
  check("a run", ((Status(*)(void*, void*, const char* const*, void* const*, size_t, const char* const*, size_t, void**))
                      api[RUN])(session, NULL, names, values, count, outputs, wanted, results));
  int wrong = 0;
  for (uint64_t i = 0; i < wanted; i++) {
    void* data = NULL;
    check("an output", ((Status(*)(void*, void**))api[DATA])(results[i], &data));
    wrong |= memcmp(data, expected[i], lengths[i]) != 0;
    ((void (*)(void*))api[RELEASE_VALUE])(results[i]);
  }
  for (uint64_t i = 0; i < count; i++) ((void (*)(void*))api[RELEASE_VALUE])(values[i]);
  ((void (*)(void*))api[RELEASE_SESSION])(session);
  return wrong;
}

int main(int argc, char** argv) {
  if (argc != 4) fail("arguments", "give ONNX Runtime's library, that of the operators, and the cases");
  void *runtime = opened(argv[1]), *kernels = opened(argv[2]);
  if (!runtime || !kernels) fail(runtime ? argv[2] : argv[1], "cannot be loaded");
  const Base* (*get_base)(void) = (const Base* (*)(void))symbol(runtime, "OrtGetApiBase");
  Status (*add)(void*, const Base*) = (Status(*)(void*, const Base*))symbol(kernels, "RegisterCustomOps");
  const char* (*instructions)(void) = (const char* (*)(void))symbol(kernels, "eagle_instruction_set");
  if (!get_base || !add || !instructions) fail("the libraries", "a function is missing");
  const Base* base = get_base();
  api = base->get_api(17);
  if (!api) fail("ONNX Runtime", "is older than 1.17");
  void *env = NULL, *options = NULL, *memory = NULL;
  check("ONNX Runtime", ((Status(*)(int, const char*, void**))api[ENV])(3, "replay", &env));
  check("options", ((Status(*)(void**))api[OPTIONS])(&options));
  check("threads", ((Status(*)(void*, int))api[THREADS])(options, 2));
  check("the operators", add(options, base));
  check("memory", ((Status(*)(int, int, void**))api[CPU_MEMORY])(0, 0, &memory));
  FILE* file = fopen(argv[3], "rb");
  if (!file) fail(argv[3], "cannot be read");
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  char* content = malloc((size_t)size);
  rewind(file);
  if (fread(content, 1, (size_t)size, file) != (size_t)size) fail(argv[3], "cannot be read");
  Bytes from = {content, content + size};
  const uint64_t cases = number(&from);
  int wrong = 0;
  for (uint64_t i = 0; i < cases; i++) wrong += wrong_bits(&from, env, options, memory);
  printf("onnxruntime %s, %s: %d of %d cases have other bits\n", base->version(), instructions(), wrong, (int)cases);
  return wrong != 0;
}
