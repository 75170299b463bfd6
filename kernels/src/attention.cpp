// ExactTreeAttention: attention over a head-major cache and the new rows of a tree. A row's result depends on its visible
// columns, in the order of their positions, and on nothing else.
//
//   inputs   q [1, T, heads * D] or [1, T, heads, D], k and v alike with kv_heads, fp32
//            past keys [kv_heads, C, D], past values [kv_heads, D / cut, C, cut], fp32 or both fp16; or both
//            [1, P, kv_heads, D] fp32, without a window
//            position_ids [1, T] int64, the first being the number of committed columns; of the second form P - L + T
//            columns are committed, whatever the positions
//            tree_mask [1, 1, T, T] fp32: a row sees the new rows at which it is above -1; of the second form
//            [1, 1, T, L]: the last L - T rows of the past belong to the tree too
//            cosine and sine [1, T, D / 2] fp32, or neither: q and k are rotated already
//   outputs  [1, T, heads * D], new keys and new values [1, T, kv_heads, D], fp32
//   attributes  heads, kv_heads, width (D), scale; window (0: none), softcap (0: none)
#include <string.h>

#include "kernels.hpp"
#include "operators.hpp"
#include "steps.hpp"

namespace eagle {
namespace {
constexpr double FEW = 100e3;      // multiply-adds that one thread computes as fast as several
constexpr int64_t SPLIT_ROWS = 32;  // up to so many rows columns are split among threads, above rows are
constexpr int64_t BLOCK_ROWS = 48;  // rows times query heads per key of one piece of work, where rows are split
constexpr int64_t MANY = 8192;      // numbers that are worth several threads' rotating or folding

struct Heads {
  int64_t heads = 0, kv_heads = 0, width = 0, window = 0;
  float scale = 1, cap = 0;
  const Kernels* kernels = nullptr;
};

ort::Status create(const Source& source, void** what) {
  Heads node;
  const bool sizes = source.attribute("heads", &node.heads) && source.attribute("kv_heads", &node.kv_heads) &&
                     source.attribute("width", &node.width) && source.attribute("scale", &node.scale);
  source.attribute("window", &node.window);
  source.attribute("softcap", &node.cap);
  if (!sizes || node.heads < 1 || node.heads > 4096 || node.kv_heads < 1 || node.heads % node.kv_heads ||
      node.width < 8 || node.width > 1024 || node.width % 8 || node.window < 0 || !(node.cap >= 0) || source.outputs != 3)
    return ort::error("ExactTreeAttention: heads, kv_heads, width, scale, window or softcap are missing or wrong");
  node.kernels = &chosen();
  Heads* p = make<Heads>();
  if (p == nullptr) return ort::error(NO_MEMORY);
  *p = node;
  *what = p;
  return nullptr;
}

bool rows_of(const ort::Tensor& t, int64_t rows, int64_t heads, int64_t width) {
  if (t.type != ort::FLOAT || t.data == nullptr || t.dims[0] != 1 || t.dims[1] != rows) return false;
  return (t.rank == 3 && t.dims[2] == heads * width) || (t.rank == 4 && t.dims[2] == heads && t.dims[3] == width);
}

// Keys [kv_heads, C, D], values [kv_heads, D / cut, C, cut].
bool lay_out_heads(const Heads& node, const ort::Tensor& keys, const ort::Tensor& values, Attention* job) {
  const int64_t D = node.width, cut = values.rank == 4 ? values.dims[3] : 0, columns = keys.dims[1];
  job->half = keys.type == ort::FLOAT16;
  const int kind = job->half ? ort::FLOAT16 : ort::FLOAT;
  if (!keys.is(kind, 3) || keys.dims[0] != node.kv_heads || columns < 1 || keys.dims[2] != D || !values.is(kind, 4) ||
      values.dims[0] != node.kv_heads || cut < 8 || cut % 8 || values.dims[1] * cut != D || values.dims[2] != columns)
    return false;
  job->columns = columns, job->cut = cut;
  job->key_head = job->value_head = columns * D, job->key_column = D;
  job->value_column = cut, job->value_piece = columns * cut;
  return true;
}

// Keys and values [1, P, kv_heads, D]; of none there is no memory.
bool lay_out_rows(const Heads& node, const ort::Tensor& keys, const ort::Tensor& values, Attention* job) {
  const int64_t D = node.width, columns = keys.dims[1];
  const ort::Tensor* both[] = {&keys, &values};
  for (const ort::Tensor* t : both)
    if (t->type != ort::FLOAT || t->rank != 4 || t->dims[0] != 1 || t->dims[1] != columns || columns < 0 ||
        (columns > 0 && t->data == nullptr) || t->dims[2] != node.kv_heads || t->dims[3] != D || node.window)
      return false;
  job->half = false;
  job->columns = columns, job->cut = D;
  job->key_head = job->value_head = D, job->key_column = job->value_column = node.kv_heads * D;
  job->value_piece = 0;
  return true;
}

// Whether row t sees the new rows 0 .. t and no others, for all rows.
bool is_chain(const float* mask, int64_t rows) {
  for (int64_t t = 0; t < rows; t++) {
    const float* row = mask + t * rows;
    int64_t other = 0;
    for (int64_t u = 0; u <= t; u++) other += !(row[u] > -1);
    for (int64_t u = t + 1; u < rows; u++) other += row[u] > -1;
    if (other) return false;
  }
  return true;
}

ort::Status read(const Heads& node, Pass* pass, Attention* job, const float** mask) {
  const ort::Tensor &q = pass->input(0), &k = pass->input(1), &v = pass->input(2), &keys = pass->input(3);
  const ort::Tensor &values = pass->input(4), &positions = pass->input(5), &tree = pass->input(6);
  const ort::Tensor &cosine = pass->input(7), &sine = pass->input(8);
  Attention& j = *job;
  const int64_t rows = q.rank >= 2 ? q.dims[1] : 0, D = node.width;
  if (rows < 1 || rows > (1 << 20) || !rows_of(q, rows, node.heads, D) || !rows_of(k, rows, node.kv_heads, D) ||
      !rows_of(v, rows, node.kv_heads, D))
    return ort::error("ExactTreeAttention: q, k or v have another shape or type");
  const bool by_rows = keys.rank == 4;
  if (!(by_rows ? lay_out_rows(node, keys, values, job) : lay_out_heads(node, keys, values, job)))
    return ort::error("ExactTreeAttention: past keys or values have another shape or type");
  const int64_t seen = tree.rank == 4 ? tree.dims[3] : 0;
  if (!positions.is(ort::INT64, 2) || positions.dims[0] != 1 || positions.dims[1] != rows || !tree.is(ort::FLOAT, 4) ||
      tree.dims[0] != 1 || tree.dims[1] != 1 || tree.dims[2] != rows || seen < rows ||
      seen > rows + (by_rows ? j.columns : 0))
    return ort::error("ExactTreeAttention: position_ids or tree_mask have another shape or type");
  const bool rotates = cosine.data != nullptr || sine.data != nullptr;
  const ort::Tensor* tables[] = {&cosine, &sine};
  for (const ort::Tensor* t : tables)
    if (rotates && (!t->is(ort::FLOAT, 3) || t->dims[0] != 1 || t->dims[1] != rows || t->dims[2] * 2 != D || D % 16))
      return ort::error("ExactTreeAttention: cosine or sine have another shape or type");
  j.rows = rows, j.earlier = seen - rows;
  j.heads = node.heads, j.kv_heads = node.kv_heads, j.width = D, j.window = node.window;
  j.scale = node.scale, j.cap = node.cap;
  j.positions = static_cast<const int64_t*>(positions.data);
  j.committed = by_rows ? j.columns - j.earlier : j.positions[0];
  if (j.committed < 0 || j.committed > j.columns)
    return ort::error("ExactTreeAttention: the first position is not a number of columns of the cache");
  j.q = static_cast<const float*>(q.data), j.k = static_cast<const float*>(k.data), j.v = static_cast<const float*>(v.data);
  j.past_keys = keys.data, j.past_values = values.data;
  j.cosine = static_cast<const float*>(cosine.data), j.sine = static_cast<const float*>(sine.data);
  *mask = static_cast<const float*>(tree.data);
  const int64_t out[3] = {1, rows, node.heads * D}, rows_out[4] = {1, rows, node.kv_heads, D};
  RETURN_IF_ERROR(pass->output(0, out, 3, &j.out));
  RETURN_IF_ERROR(pass->output(1, rows_out, 4, &j.new_keys));
  return pass->output(2, rows_out, 4, &j.new_values);
}

// What a mask says. Layers have one in common, which is read once.
bool look(const float* mask, const Attention& j, Pass* pass) {
  const int64_t tree = j.earlier + j.rows;
  Visible& seen = pass->visible;
  if (seen.mask == mask && seen.rows == j.rows && seen.tree == tree) return true;
  seen = {mask, j.rows, tree, j.rows, j.earlier == 0 && is_chain(mask, j.rows), nullptr, nullptr};
  if (seen.chain) return true;
  int64_t count = 0;
  for (int64_t i = 0; i < j.rows * tree; i++) count += mask[i] > -1;
  int32_t* list = reinterpret_cast<int32_t*>(pass->memory.get(static_cast<size_t>(count + j.rows + 2) * 4));
  if (list == nullptr) {
    seen.mask = nullptr;
    return false;
  }
  int32_t *first = list + count, n = 0;
  seen.longest = 0;
  first[0] = 0;
  for (int64_t t = 0; t < j.rows; t++) {
    for (int64_t u = 0; u < tree; u++)
      if (mask[t * tree + u] > -1) list[n++] = static_cast<int32_t>(u);
    first[t + 1] = n;
    if (n - first[t] > seen.longest) seen.longest = n - first[t];
  }
  seen.seen = list, seen.first = first;
  return true;
}

struct Work {
  Attention job;
  const Kernels* kernels;
  float *keys_out, *values_out;  // where the tree's earlier rows do not precede them
  int64_t step, blocks;          // where rows are split
};

void prepare(const void* work, int64_t first, int64_t last, uint8_t*) {
  const Work& w = *static_cast<const Work*>(work);
  for (int64_t h = first; h < last; h++) w.kernels->prepare(w.job, h);
}

// As `prepare`, where rows of the tree are in the cache: they are put before the new ones.
void prepare_joined(const void* work, int64_t first, int64_t last, uint8_t* scratch) {
  const Work& w = *static_cast<const Work*>(work);
  const Attention& j = w.job;
  const int64_t row = j.kv_heads * j.width;
  const size_t before = static_cast<size_t>(j.earlier * row) * 4, rows = static_cast<size_t>(j.rows * row) * 4;
  memcpy(j.new_keys, static_cast<const float*>(j.past_keys) + j.committed * row, before);
  memcpy(j.new_values, static_cast<const float*>(j.past_values) + j.committed * row, before);
  prepare(work, first, last, scratch);
  memcpy(w.keys_out, j.new_keys + j.earlier * row, rows);
  memcpy(w.values_out, j.new_values + j.earlier * row, rows);
}

void part(const void* work, int64_t first, int64_t last, uint8_t* scratch) {
  const Work& w = *static_cast<const Work*>(work);
  for (int64_t i = first; i < last; i++)
    w.kernels->part(w.job, i / w.job.groups, i % w.job.groups, reinterpret_cast<float*>(scratch));
}

void join(const void* work, int64_t first, int64_t last, uint8_t*) {
  const Work& w = *static_cast<const Work*>(work);
  for (int64_t h = first; h < last; h++) w.kernels->join(w.job, h);
}

void whole(const void* work, int64_t from, int64_t to, uint8_t* scratch) {
  const Work& w = *static_cast<const Work*>(work);
  const Attention& j = w.job;
  for (int64_t i = from; i < to; i++) {
    const int64_t first = (w.blocks - 1 - i / j.kv_heads) * w.step;  // the last rows see most: they go first
    const int64_t last = first + w.step < j.rows ? first + w.step : j.rows;
    w.kernels->whole(j, i % j.kv_heads, first, last, reinterpret_cast<float*>(scratch));
  }
}

ort::Status plan(const void* what, Pass* pass) {
  const Heads& node = *static_cast<const Heads*>(what);
  Work* work = pass->memory.get_zeros<Work>(1);
  if (work == nullptr) return ort::error(NO_MEMORY);
  Attention& j = work->job;
  const float* mask = nullptr;
  RETURN_IF_ERROR(read(node, pass, &j, &mask));
  if (!look(mask, j, pass)) return ort::error(NO_MEMORY);
  const Visible& seen = pass->visible;
  j.chain = seen.chain, j.longest = seen.longest, j.seen = seen.seen, j.first = seen.first;
  work->kernels = node.kernels, work->keys_out = j.new_keys, work->values_out = j.new_values;

  const int64_t sharing = j.sharing(), rows = j.rows * sharing;
  j.groups = (j.committed + j.longest + GROUP - 1) / GROUP;
  const bool split = j.rows <= SPLIT_ROWS;
  const size_t queries = static_cast<size_t>(j.kv_heads * rows * j.width);
  const size_t parts = split ? static_cast<size_t>(j.kv_heads * j.groups * rows * (j.width + 2)) : 0;
  const size_t joined = j.earlier ? static_cast<size_t>((j.earlier + j.rows) * j.kv_heads * j.width) : 0;
  j.queries = reinterpret_cast<float*>(pass->memory_at(&pass->work, (queries + parts + 2 * joined) * 4 + 64));
  if (j.queries == nullptr) return ort::error(NO_MEMORY);
  j.parts = j.queries + queries;
  if (j.earlier) j.new_keys = j.parts + parts, j.new_values = j.new_keys + joined;

  const bool alone = 2.0 * double(j.committed + j.rows / 2 + 1) * double(rows * j.kv_heads * j.width) < FEW;
  const bool few = rows * j.kv_heads * j.width < MANY;
  pass->add(j.earlier ? prepare_joined : prepare, work, j.kv_heads, alone || few || j.earlier);
  if (split) {
    pass->needs(node.kernels->scratch(j, j.rows) * 4);
    pass->add(part, work, j.kv_heads * j.groups, alone);
    pass->add(join, work, j.kv_heads, alone || rows * j.kv_heads * j.width * j.groups < MANY);
  } else {
    work->step = BLOCK_ROWS / sharing > 1 ? BLOCK_ROWS / sharing : 1;
    work->blocks = (j.rows + work->step - 1) / work->step;
    pass->needs(node.kernels->scratch(j, work->step) * 4);
    pass->add(whole, work, j.kv_heads * work->blocks, alone);
  }
  return nullptr;
}

constexpr ort::CustomOp OPERATOR = {
    ort::OP_VERSION,
    nullptr,
    [](const ort::CustomOp*) { return "ExactTreeAttention"; },
    [](const ort::CustomOp*) -> const char* { return nullptr; },
    [](const ort::CustomOp*, size_t i) { return int(i == 5 ? ort::INT64 : ort::FLOAT); },
    [](const ort::CustomOp*) -> size_t { return 9; },
    [](const ort::CustomOp*, size_t) { return int(ort::FLOAT); },
    [](const ort::CustomOp*) -> size_t { return 3; },
    nullptr,
    destroy_steps,
    [](const ort::CustomOp*, size_t i) { return i < 7 ? 0 : 1; },
    [](const ort::CustomOp*, size_t) { return 0; },
    [](const ort::CustomOp*, size_t) { return 0; },
    [](const ort::CustomOp*) { return 0; },
    [](const ort::CustomOp*) { return 0; },
    [](const ort::CustomOp*) { return 0; },
    [](const ort::CustomOp*) { return 0; },
    [](const ort::CustomOp*, const void*, const void* info, void** kernel) { return create_one(ATTENTION, info, kernel); },
    compute_steps,
};
}  // namespace

const Kind ATTENTION = {9, [](int) { return true; }, create, [](void* what) { unmake(static_cast<Heads*>(what)); }, plan};

const ort::CustomOp* attention_operator() { return &OPERATOR; }
}  // namespace eagle
