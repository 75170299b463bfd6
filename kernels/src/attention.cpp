// ExactTreeAttention: attention over a head-major cache and the new rows of a tree. A row's result depends on its visible
// columns, in the order of their positions, and on nothing else.
//
//   inputs   q [1, T, heads * D] or [1, T, heads, D], k and v alike with kv_heads, fp32
//            past keys [kv_heads, C, D], past values [kv_heads, D / cut, C, cut], fp32 or both fp16; or keys
//            [kv_heads, C, D + 4] and values [kv_heads, 1, C, D + 4] uint8, D signed bytes and their scale, for D a
//            multiple of 16; or both [1, P, kv_heads, D] fp32, without a window
//            position_ids [1, T] int64, the first being the number of committed columns; of the second form P - L + T
//            columns are committed, whatever the positions
//            tree_mask [1, 1, T, T] fp32: a row sees the new rows at which it is above -1; of the second form
//            [1, 1, T, L]: the last L - T rows of the past belong to the tree too; [1, 1, T, T + 1] for rows of several
//            texts that were announced (eagle_next_texts), whose last column numbers the text of a row, from 0 on
//            cosine and sine [1, T, R / 2] fp32, by which the first R numbers of each head of q and k are rotated, or neither
//            sinks [heads] fp32, or nothing: of each head a score without a key, which takes its share of a row's weights
//   outputs  [1, T, heads * D], new keys and new values [1, T, kv_heads, D], fp32; with a past in fp16 the nearest values
//            that it has, beyond its range the largest; with a past of bytes [1, T, kv_heads, D / 4 + 1], its bytes
//   attributes  heads, kv_heads, width (D), scale; window (0: none), softcap (0: none)
#include "attention.hpp"

#include <string.h>

#include "operators.hpp"

namespace eagle {
namespace {
constexpr double FEW = 100e3;       // multiply-adds that one thread computes as fast as several
constexpr int64_t SPLIT_ROWS = 32;  // up to so many rows columns are split among threads, above rows are
constexpr int64_t BLOCK_ROWS = 48;  // rows times query heads per key of one piece of work, where rows are split
constexpr int64_t PIECES = 6;       // of a pass over few columns, at least: rows are split until there are as many
constexpr int64_t MANY = 8192;      // numbers that are worth several threads' rotating or folding

// Texts of the next pass of this thread, for each shape of layers' caches.
constexpr int64_t MOST_TEXTS = 64, MOST_SHAPES = 4;
thread_local Text texts[MOST_SHAPES * MOST_TEXTS];
thread_local int64_t text_count = 0, shape_count = 0;
constexpr int ONLY_THERE = 2;
thread_local int writes_rows = 0;  // see eagle_write_rows

ort::Status read(const Source& source, Heads* heads) {
  Heads& node = *heads;
  const bool sizes = source.attribute("heads", &node.heads) && source.attribute("kv_heads", &node.kv_heads) &&
                     source.attribute("width", &node.width) && source.attribute("scale", &node.scale);
  source.attribute("window", &node.window);
  source.attribute("softcap", &node.cap);
  if (!sizes || node.heads < 1 || node.heads > 4096 || node.kv_heads < 1 || node.heads % node.kv_heads ||
      node.width < 8 || node.width > MOST_WIDTH || node.width % 8 || node.window < 0 || !(node.cap >= 0) ||
      source.outputs != 3)
    return ort::error("ExactTreeAttention: heads, kv_heads, width, scale, window or softcap are missing or wrong");
  node.kernels = &chosen();
  return nullptr;
}

bool rows_of(const ort::Tensor& t, int64_t rows, int64_t heads, int64_t width) {
  return t.is(ort::FLOAT, 1, rows, heads * width) || t.is(ort::FLOAT, 1, rows, heads, width);
}

// Keys [kv_heads, C, D], values [kv_heads, D / cut, C, cut]; of bytes D + 4, and one piece.
void spread(Attention* job, int64_t columns) {
  job->columns = columns;
  job->key_head = job->value_head = columns * job->key_column, job->value_piece = columns * job->value_column;
}
bool lay_out_heads(const Heads& node, const ort::Tensor& keys, const ort::Tensor& values, Attention* job) {
  const bool bytes = keys.type == ort::UINT8;
  const int kind = bytes ? ort::UINT8 : keys.type == ort::FLOAT16 ? ort::FLOAT16 : ort::FLOAT;
  const int64_t D = node.width, scale = bytes ? SCALE : 0, columns = keys.dims[1];
  const int64_t cut = values.dims[3] - scale;
  if (columns < 1 || cut < 8 || cut % 8 || D % cut || (bytes && (cut != D || D % 16)) ||
      !keys.is(kind, node.kv_heads, columns, D + scale) ||
      !values.is(kind, node.kv_heads, D / cut, columns, cut + scale))
    return false;
  job->numbers = bytes ? BYTES : kind == ort::FLOAT16 ? HALF : SINGLE;
  job->row = bytes ? D / 4 + 1 : D;
  job->cut = cut, job->key_column = D + scale, job->value_column = cut + scale;
  spread(job, columns);
  return true;
}

// Keys and values [1, P, kv_heads, D]; of none there is no memory.
bool lay_out_rows(const Heads& node, const ort::Tensor& keys, const ort::Tensor& values, Attention* job) {
  const int64_t D = node.width, columns = keys.dims[1];
  if (node.window || !keys.is(ort::FLOAT, 1, columns, node.kv_heads, D) ||
      !values.is(ort::FLOAT, 1, columns, node.kv_heads, D))
    return false;
  job->numbers = SINGLE, job->row = D;
  job->columns = columns, job->cut = D;
  job->key_head = job->value_head = D, job->key_column = job->value_column = node.kv_heads * D;
  job->value_piece = 0;
  return true;
}

// Whether row t sees the new rows 0 .. t and no others, for all rows. apart: from a row of the mask to the next.
bool is_chain(const float* mask, int64_t rows, int64_t apart) {
  for (int64_t t = 0; t < rows; t++) {
    const float* row = mask + t * apart;
    int64_t other = 0;
    for (int64_t u = 0; u <= t; u++) other += !(row[u] > -1);
    for (int64_t u = t + 1; u < rows; u++) other += row[u] > -1;
    if (other) return false;
  }
  return true;
}

// The rows of one text: `count` texts follow each other in a mask's last column, or there is one alone.
ort::Status divide(const float* mask, int64_t rows, bool several, Visible* seen, Pass* pass) {
  const int64_t apart = seen->apart;
  const float last = several ? mask[rows * apart - 1] : 0;
  seen->count = last >= 0 && last < static_cast<float>(rows) ? static_cast<int64_t>(last) + 1 : 0;
  if (seen->count < 1 || (several && seen->count != text_count))
    return ort::error("ExactTreeAttention: rows are of other texts than those that were announced");
  seen->texts = pass->memory.get_zeros<Seen>(static_cast<size_t>(seen->count));
  if (seen->texts == nullptr) return ort::error(NO_MEMORY);
  if (!several) {
    seen->texts[0].rows = rows;
    return nullptr;
  }
  int64_t text = -1;
  for (int64_t t = 0; t < rows; t++) {
    const float* row = mask + t * apart;
    if (row[rows] == static_cast<float>(text + 1) && text + 1 < seen->count) seen->texts[++text].row = t;
    if (text < 0 || row[rows] != static_cast<float>(text))
      return ort::error("ExactTreeAttention: rows of one text do not stand together");
    seen->texts[text].rows++;
  }
  for (int64_t i = 0; i < seen->count; i++) {
    const int64_t first = seen->texts[i].row, end = first + seen->texts[i].rows;
    for (int64_t t = first; t < end; t++)
      for (int64_t u = 0; u < rows; u++)
        if (mask[t * apart + u] > -1 && (u < first || u >= end))
          return ort::error("ExactTreeAttention: a row sees one of another text");
  }
  return text + 1 == seen->count ? nullptr : ort::error("ExactTreeAttention: a text has no rows");
}

// What rows of one text see. mask: at its first row and that row's own column; tree: columns that count.
ort::Status look_at(const float* mask, int64_t tree, int64_t earlier, int64_t apart, Seen* text, Pass* pass) {
  text->chain = earlier == 0 && is_chain(mask, text->rows, apart);
  text->longest = text->rows;
  if (text->chain) return nullptr;
  int32_t* first = reinterpret_cast<int32_t*>(pass->memory.get(static_cast<size_t>(text->rows * (tree + 1) + 1) * 4));
  if (first == nullptr) return ort::error(NO_MEMORY);
  int32_t *list = first + text->rows + 1, n = 0;
  text->longest = 0;
  first[0] = 0;
  for (int64_t t = 0; t < text->rows; t++) {
    for (int64_t u = 0; u < tree; u++)
      if (mask[t * apart + u] > -1) list[n++] = static_cast<int32_t>(u);
    first[t + 1] = n;
    if (n - first[t] > text->longest) text->longest = n - first[t];
  }
  text->seen = list, text->first = first;
  return nullptr;
}

}  // namespace

ort::Status look(const ort::Tensor& positions, const ort::Tensor& tree, int64_t rows, int64_t most_earlier, Pass* pass,
                 bool* several) {
  const int64_t apart = tree.dims[3];
  const float* mask = static_cast<const float*>(tree.data);
  *several = text_count > 0 && apart == rows + 1;
  if (!positions.is(ort::INT64, 1, rows) || !tree.is(ort::FLOAT, 1, 1, rows, apart) || apart < rows ||
      apart > rows + (*several ? 1 : most_earlier))
    return ort::error("ExactTreeAttention: position_ids or tree_mask have another shape or type");
  Visible& seen = pass->visible;
  if (seen.mask == mask && seen.rows == rows && seen.apart == apart) return nullptr;
  seen = {nullptr, rows, apart, 0, nullptr};
  RETURN_IF_ERROR(divide(mask, rows, *several, &seen, pass));
  for (int64_t i = 0; i < seen.count; i++) {
    Seen& text = seen.texts[i];
    const int64_t columns = *several ? text.rows : apart, earlier = *several ? 0 : apart - rows;
    RETURN_IF_ERROR(look_at(mask + text.row * (apart + *several), columns, earlier, apart, &text, pass));
  }
  seen.mask = mask;
  return nullptr;
}

ort::Status read_cache(const Heads& node, Pass* pass, int first, int64_t rows, Attention* job, bool* several) {
  const ort::Tensor &keys = pass->input(first), &values = pass->input(first + 1);
  const ort::Tensor &positions = pass->input(first + 2), &tree = pass->input(first + 3);
  Attention& j = *job;
  const bool by_rows = keys.rank == 4;
  if (!(by_rows ? lay_out_rows(node, keys, values, job) : lay_out_heads(node, keys, values, job)))
    return ort::error("ExactTreeAttention: past keys or values have another shape or type");
  RETURN_IF_ERROR(look(positions, tree, rows, by_rows ? j.columns : 0, pass, several));
  j.rows = rows, j.earlier = *several ? 0 : tree.dims[3] - rows;
  j.heads = node.heads, j.kv_heads = node.kv_heads, j.width = node.width, j.window = node.window;
  j.positions = static_cast<const int64_t*>(positions.data);
  j.committed = by_rows ? j.columns - j.earlier : j.positions[0];
  if (j.committed < 0 || j.committed > j.columns)
    return ort::error("ExactTreeAttention: the first position is not a number of columns of the cache");
  j.past_keys = keys.data, j.past_values = values.data;
  const int64_t out[3] = {1, rows, node.heads * node.width}, rows_out[4] = {1, rows, node.kv_heads, j.row};
  RETURN_IF_ERROR(pass->output(0, out, 3, &j.out));
  if (writes_rows == ONLY_THERE && !by_rows) {
    const size_t count = static_cast<size_t>(rows * node.kv_heads * j.row);
    j.new_keys = reinterpret_cast<float*>(pass->memory_at(&pass->rows, 2 * count * sizeof(float)));
    j.new_values = j.new_keys + count;
    if (j.new_keys == nullptr) return ort::error(NO_MEMORY);
  } else {
    RETURN_IF_ERROR(pass->output(1, rows_out, 4, &j.new_keys));
    RETURN_IF_ERROR(pass->output(2, rows_out, 4, &j.new_values));
  }
  return nullptr;
}

namespace {
ort::Status read(const Heads& node, Pass* pass, Attention* job, bool* several) {
  const ort::Tensor &q = pass->input(0), &k = pass->input(1), &v = pass->input(2);
  const ort::Tensor &cosine = pass->input(7), &sine = pass->input(8), &sinks = pass->input(9);
  Attention& j = *job;
  const int64_t rows = q.rank >= 2 ? q.dims[1] : 0, D = node.width;
  if (rows < 1 || rows > (1 << 20) || !rows_of(q, rows, node.heads, D) || !rows_of(k, rows, node.kv_heads, D) ||
      !rows_of(v, rows, node.kv_heads, D))
    return ort::error("ExactTreeAttention: q, k or v have another shape or type");
  RETURN_IF_ERROR(read_cache(node, pass, 3, rows, job, several));
  const bool rotates = cosine.data != nullptr || sine.data != nullptr;
  const int64_t half = rotates ? cosine.dims[2] : 0;
  if (rotates && (half < 8 || half % 8 || half > D / 2 || !cosine.is(ort::FLOAT, 1, rows, half) ||
                  !sine.is(ort::FLOAT, 1, rows, half)))
    return ort::error("ExactTreeAttention: cosine or sine have another shape or type");
  if (sinks.data != nullptr && !sinks.is(ort::FLOAT, node.heads))
    return ort::error("ExactTreeAttention: sinks have another shape or type");
  j.scale = node.scale, j.cap = node.cap, j.turned = 2 * half;
  for (int64_t t = 0; t < rows && node.window; t++)
    if (j.positions[t] < 0 || j.positions[t] > INT64_MAX / 2)
      return ort::error("ExactTreeAttention: a position is negative or too large");
  j.q = static_cast<const float*>(q.data), j.k = static_cast<const float*>(k.data),
  j.v = static_cast<const float*>(v.data);
  j.cosine = static_cast<const float*>(cosine.data), j.sine = static_cast<const float*>(sine.data);
  j.sinks = static_cast<const float*>(sinks.data);
  return nullptr;
}

// What was announced of the shape whose layers' caches have these keys of text 0: the one that begins next before them.
const Text* texts_with(const void* past_keys) {
  const int64_t keys = reinterpret_cast<int64_t>(past_keys);
  const Text* found = texts;
  for (const Text* one = texts; one < texts + shape_count * text_count; one += text_count)
    if (one->keys <= keys && (found->keys > keys || one->keys > found->keys)) found = one;
  return found;
}

}  // namespace

ort::Status find_text(const void* keys, const void* values, int64_t columns, int64_t i, Text* own) {
  const Text *announced = texts_with(keys), &first = announced[0];
  *own = announced[i];
  const int64_t at = reinterpret_cast<int64_t>(keys);
  const int64_t layer = first.key_layer > 0 ? (at - first.keys) / first.key_layer : -1;
  if (layer < 0 || first.keys + layer * first.key_layer != at ||
      first.values + layer * first.value_layer != reinterpret_cast<int64_t>(values) || first.columns != columns ||
      own->columns < 1 || own->committed < 0 || own->committed > own->columns)
    return ort::error("ExactTreeAttention: a text's cache is not as it was announced");
  own->keys += layer * own->key_layer, own->values += layer * own->value_layer, own->next += layer * own->value_layer;
  return nullptr;
}

namespace {
// The rows of text i among those of a pass, whose cache is that of text 0 in this layer.
ort::Status narrow_to(const Seen& seen, int64_t i, const Heads& node, Attention* job) {
  Attention& j = *job;
  const int64_t D = j.width, row = seen.row, from = row * j.kv_heads * D, to = row * j.kv_heads * j.row;
  Text own;
  RETURN_IF_ERROR(find_text(j.past_keys, j.past_values, j.columns, i, &own));
  j.past_keys = reinterpret_cast<const void*>(own.keys), j.past_values = reinterpret_cast<const void*>(own.values);
  j.columns = own.columns, j.committed = own.committed;
  if (j.value_piece > 0) spread(job, own.columns);
  j.rows = seen.rows, j.positions += row;
  j.q += row * node.heads * D, j.out += row * node.heads * D;
  j.k += from, j.v += from, j.new_keys += to, j.new_values += to;
  if (j.turned) j.cosine += row * j.turned / 2, j.sine += row * j.turned / 2;
  return nullptr;
}

}  // namespace

ort::Status text_job(const Heads& node, const Attention& all, const Visible& seen, int64_t i, bool several,
                     Attention* job) {
  const Seen& own = seen.texts[i];
  *job = all;
  if (several) RETURN_IF_ERROR(narrow_to(own, i, node, job));
  job->writes = writes_rows != 0 && job->value_piece > 0;
  if (job->writes && job->committed + job->rows > job->columns)
    return ort::error("ExactTreeAttention: the cache has no columns for the new rows");
  job->chain = own.chain, job->longest = own.longest, job->seen = own.seen, job->first = own.first;
  return job->committed + job->longest < 1 ? ort::error("ExactTreeAttention: no row sees a column") : nullptr;
}

namespace {
struct Part {  // of the work: the rows of one text
  Attention job;
  int64_t step, blocks;  // where rows are split; else 0
  int64_t pieces() const { return job.kv_heads * (blocks ? blocks : job.groups); }
};
struct Work {
  int64_t count;  // of parts
  Part* parts;
  const Kernels* kernels;
  float *keys_out, *values_out;  // where the tree's earlier rows do not precede them
};

void prepare(const void* work, int64_t first, int64_t last, uint8_t*) {
  const Work& w = *static_cast<const Work*>(work);
  const int64_t heads = w.parts[0].job.kv_heads;
  for (int64_t i = first; i < last; i++) w.kernels->prepare(w.parts[i / heads].job, i % heads);
}

// As `prepare`, where rows of the tree are in the cache: they are put before the new ones.
void prepare_joined(const void* work, int64_t first, int64_t last, uint8_t* scratch) {
  const Work& w = *static_cast<const Work*>(work);
  const Attention& j = w.parts[0].job;
  const int64_t row = j.kv_heads * j.width;
  const size_t before = static_cast<size_t>(j.earlier * row) * 4, rows = static_cast<size_t>(j.rows * row) * 4;
  memcpy(j.new_keys, static_cast<const float*>(j.past_keys) + j.committed * row, before);
  memcpy(j.new_values, static_cast<const float*>(j.past_values) + j.committed * row, before);
  prepare(work, first, last, scratch);
  memcpy(w.keys_out, j.new_keys + j.earlier * row, rows);
  memcpy(w.values_out, j.new_values + j.earlier * row, rows);
}

// Groups of columns of all rows, or all columns of some rows.
void sums(const void* work, int64_t first, int64_t last, uint8_t* bytes) {
  const Work& w = *static_cast<const Work*>(work);
  float* scratch = reinterpret_cast<float*>(bytes);
  for (const Part* part = w.parts; part < w.parts + w.count && last > 0; part++) {
    const Attention& j = part->job;
    const int64_t end = last < part->pieces() ? last : part->pieces();
    for (int64_t i = first < 0 ? 0 : first; i < end; i++) {
      if (part->blocks == 0) {
        w.kernels->part(j, i / j.groups, i % j.groups, scratch);
        continue;
      }
      const int64_t from = (part->blocks - 1 - i / j.kv_heads) * part->step;  // the last rows see most: they go first
      w.kernels->whole(j, i % j.kv_heads, from, from + part->step < j.rows ? from + part->step : j.rows, scratch);
    }
    first -= part->pieces(), last -= part->pieces();
  }
}

void join(const void* work, int64_t first, int64_t last, uint8_t*) {
  const Work& w = *static_cast<const Work*>(work);
  const int64_t heads = w.parts[0].job.kv_heads;
  for (int64_t i = first; i < last; i++)
    if (w.parts[i / heads].blocks == 0) w.kernels->join(w.parts[i / heads].job, i % heads);
}

ort::Status plan(const void* what, Pass* pass) {
  const Heads& node = *static_cast<const Heads*>(what);
  Work* work = pass->memory.get_zeros<Work>(1);
  if (work == nullptr) return ort::error(NO_MEMORY);
  Attention all{};
  bool several = false;
  RETURN_IF_ERROR(read(node, pass, &all, &several));
  const Visible& seen = pass->visible;
  work->count = seen.count, work->kernels = node.kernels;
  work->keys_out = all.new_keys, work->values_out = all.new_values;
  work->parts = pass->memory.get_zeros<Part>(static_cast<size_t>(seen.count));
  if (work->parts == nullptr) return ort::error(NO_MEMORY);

  const int64_t sharing = all.sharing(), D = all.width;
  const size_t joined = all.earlier ? static_cast<size_t>((all.earlier + all.rows) * all.kv_heads * D) : 0;
  size_t needed = 2 * joined;
  double products = 0;
  int64_t pieces = 0, folded = 0;
  for (int64_t i = 0; i < seen.count; i++) {
    Part& part = work->parts[i];
    Attention& j = part.job;
    RETURN_IF_ERROR(text_job(node, all, seen, i, several, &j));
    j.groups = (j.committed + j.longest + GROUP - 1) / GROUP;
    if (j.rows > SPLIT_ROWS) {
      part.step = BLOCK_ROWS / sharing > 1 ? BLOCK_ROWS / sharing : 1;
    } else if (const int64_t whole = j.kv_heads * j.groups * seen.count; whole < PIECES) {
      const int64_t times = (PIECES + whole - 1) / whole;
      part.step = (j.rows + times - 1) / times;
    }
    if (part.step && part.step < j.rows) part.blocks = (j.rows + part.step - 1) / part.step;
    const int64_t rows = j.rows * sharing;
    needed += static_cast<size_t>(j.kv_heads * rows * D);
    if (part.blocks == 0) needed += static_cast<size_t>(j.kv_heads * j.groups * rows * (D + 2));
    products += 2.0 * double(j.committed + j.rows / 2 + 1) * double(rows * j.kv_heads * D);
    pieces += part.pieces();
    folded += part.blocks == 0 ? rows * j.kv_heads * D * j.groups : 0;
    pass->needs(node.kernels->scratch(j, part.blocks ? part.step : j.rows) * 4);
  }
  float* memory = reinterpret_cast<float*>(pass->memory_at(&pass->work, needed * 4 + 64));
  if (memory == nullptr) return ort::error(NO_MEMORY);
  for (int64_t i = 0; i < seen.count; i++) {
    Attention& j = work->parts[i].job;
    const int64_t rows = j.rows * sharing;
    j.queries = memory;
    j.parts = memory += j.kv_heads * rows * D;
    if (work->parts[i].blocks == 0) memory += j.kv_heads * j.groups * rows * (D + 2);
    if (j.earlier) j.new_keys = memory, j.new_values = memory + joined;
  }
  const int64_t heads = all.kv_heads * seen.count, numbers = all.rows * sharing * all.kv_heads * D;
  const bool alone = products < FEW;
  pass->add(all.earlier ? prepare_joined : prepare, work, heads, alone || numbers < MANY || all.earlier);
  pass->add(sums, work, pieces, alone);
  if (folded) pass->add(join, work, heads, alone || folded < MANY);
  return nullptr;
}

int type_of(size_t i) { return i == 5 ? ort::INT64 : i == 3 || i == 4 ? ort::ANY : ort::FLOAT; }
constexpr Operator DECLARED = {"ExactTreeAttention", 10, 7, 3, 3, type_of, false};
constexpr ort::CustomOp OPERATOR = declaration<DECLARED>(create_node<ATTENTION>);
}  // namespace

const Kind ATTENTION = {10, [](int) { return true; }, create_kind<Heads, read>, plan};

const ort::CustomOp* attention_operator() { return &OPERATOR; }
}  // namespace eagle

// Announces the texts of the next pass of this thread: seven numbers of each, as in Text, for one shape of layers' caches
// after the other. count 0: none any more. Returns 0, or -1 where there are too many.
EXPORTED int eagle_next_texts(const int64_t* numbers, int64_t count, int64_t shapes) {
  if (count < 0 || count > eagle::MOST_TEXTS || shapes < 1 || shapes > eagle::MOST_SHAPES) return -1;
  memcpy(eagle::texts, numbers, static_cast<size_t>(count * shapes) * sizeof(eagle::Text));
  eagle::text_count = count, eagle::shape_count = shapes;
  return 0;
}

// 1: passes of this thread write new keys and values into caches that keep heads apart, after the committed columns; 2:
// there alone, and do not compute these outputs; 0: they leave caches alone, as graphs do. Whoever asks for it owns that
// memory, and has columns for the rows.
EXPORTED void eagle_write_rows(int where) { eagle::writes_rows = where; }
