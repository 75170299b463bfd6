// A step of RowExactSteps: a gated delta net, in the place of attention (Qwen3.5). A row's result depends on the
// committed state, on itself and on the tokens before it that it sees, in their order, and on nothing else.
//
//   inputs   qkv [1, T, C] fp32, q of all G key heads of width D, k, then v of H heads of width E; b and a [1, T, H]
//            past rows [1, W, C + 2 H]: qkv, b and a of the last committed rows; the first K - 1 are in the past state,
//            the others are not
//            past state [H, D, E], of each head 32 columns [D, 32] after the other, or 8 where 32 do not divide E
//            position_ids, tree_mask: as of ExactTreeAttention
//            weights [C, 1, K] of the convolution, those of the row itself last; A_log and dt_bias [H]: initializers
//   outputs  [1, T, H * E]: what rows read of the state; [1, T, C + 2 H]: qkv, b and a, past rows of later passes;
//            [H, D, E]: the state after all committed rows, which may be put where the past one lies
//   attributes  key_heads, heads, key_width, width
//
// q, k and v go through a convolution of K tokens and x * sigmoid(x). With q and k of length 1, beta = sigmoid(b) and
// decay = e^(-e^A_log * log(1 + e^(a + dt_bias))) a head makes S' = decay * S + k x (v - k decay S) beta of a state S,
// and reads q S' / root(D).
//
// RowExactScan is the same of a state space (Mamba-2), which takes nothing out of its state, and has dt [1, T, H] in the
// place of b and a, also in past rows [1, W, C + H]; after the weights a bias [C] of the convolution, and after dt_bias a
// skip [H], initializers too. With q and k as they are, step = log(1 + e^(dt + dt_bias)) and decay = e^(-e^A_log * step) a
// head makes S' = decay * S + k x v step, and reads q S' + skip * v.
#include <stdio.h>

#include "attention.hpp"

namespace eagle {
namespace {
// Of a state space, whose dt is both b and a, inputs from a to the weights are one earlier.
enum Place : int { QKV, B, A, PAST_ROWS, PAST_STATE, POSITIONS, MASK, WEIGHTS, RATES, BIASES, SKIPS };
constexpr int OFFSETS = WEIGHTS;   // of its convolution
constexpr int64_t MOST_KEPT = 64;  // states of a tree at once
constexpr int64_t MANY = 4096;     // numbers that are worth several threads' convolutions
constexpr int64_t FEW = 50000;     // numbers of states that one thread walks over as fast as several

// e^x, by its series and squares: sums and products of fp64, which are the same everywhere.
float power_of_e(float x) {
  const double small = double(x > 87 ? 87.f : x < -87 ? -87.f : x) / 1024;
  double power = 1;
  for (int i = 12; i > 0; i--) power = 1 + power * small / i;
  for (int i = 0; i < 10; i++) power *= power;
  return float(power);
}

ort::Status refused(const Delta& net, const char* why) {
  char text[160];
  snprintf(text, sizeof text, "%s: %s", net.erases ? "RowExactDelta" : "RowExactScan", why);
  return ort::error(text);
}

template <bool ERASES>
ort::Status read(const Source& source, Delta* net) {
  Delta& j = *net;
  ort::Tensor weights, rates, biases, offsets, skips;
  j.erases = ERASES;
  RETURN_IF_ERROR(source.constant(WEIGHTS - !ERASES, &weights));
  RETURN_IF_ERROR(source.constant(RATES, &rates));
  RETURN_IF_ERROR(source.constant(BIASES, &biases));
  auto fits = [](int64_t width) { return width >= 8 && width <= MOST_WIDTH && width % 8 == 0; };
  const bool sizes = source.attribute("key_heads", &j.key_heads) && source.attribute("heads", &j.heads) &&
                     source.attribute("key_width", &j.key_width) && source.attribute("width", &j.width);
  if (!sizes || j.key_heads < 1 || j.heads < 1 || j.heads > 4096 || j.heads % j.key_heads || !fits(j.key_width) ||
      !fits(j.width) || source.outputs != 3)
    return refused(j, "key_heads, heads, key_width or width are missing or wrong");
  j.tokens = weights.dims[2];
  if (j.tokens < 1 || j.tokens > MOST_TOKENS || !weights.is(ort::FLOAT, j.channels(), 1, j.tokens) ||
      !rates.is(ort::FLOAT, j.heads) || !biases.is(ort::FLOAT, j.heads))
    return refused(j, "weights, A_log or dt_bias have another shape or type");
  if (!ERASES) {
    RETURN_IF_ERROR(source.constant(OFFSETS, &offsets));
    RETURN_IF_ERROR(source.constant(SKIPS, &skips));
    if (!offsets.is(ort::FLOAT, j.channels()) || !skips.is(ort::FLOAT, j.heads))
      return refused(j, "the bias or D have another shape or type");
    RETURN_IF_ERROR(source.copy(offsets, &j.offsets));
    RETURN_IF_ERROR(source.copy(skips, &j.skips));
  }
  float* gates = source.memory->get_zeros<float>(static_cast<size_t>(2 * j.filled()));
  if (gates == nullptr) return ort::error(NO_MEMORY);
  j.rates = gates, j.biases = gates + j.filled();
  for (int64_t h = 0; h < j.heads; h++) {
    gates[h] = power_of_e(static_cast<const float*>(rates.data)[h]);
    gates[j.filled() + h] = static_cast<const float*>(biases.data)[h];
  }
  j.kernels = &chosen();
  return turn(source, weights, &j.weights);
}

// Finds an order of a text's rows, once for all layers. Children without children go first: they need no state.
ort::Status order_rows(const Delta& net, Seen* text, Pass* pass) {
  if (text->preorder.order != nullptr) return nullptr;
  const int64_t rows = text->rows;
  int32_t* parents = reinterpret_cast<int32_t*>(pass->memory.get(static_cast<size_t>(5 * rows + 1) * sizeof(int32_t)));
  if (parents == nullptr) return ort::error(NO_MEMORY);
  int32_t *order = parents + rows, *places = order + rows, *next = places + rows, *child = next + rows + 1;
  memset(places, 0, static_cast<size_t>(rows) * sizeof(int32_t));
  memset(child - 1, -1, static_cast<size_t>(rows + 1) * sizeof(int32_t));
  for (int64_t t = 0; t < rows; t++) {
    parents[t] = static_cast<int32_t>(t - 1);
    if (!text->chain) {
      const int32_t *first = text->first + t, *sees = text->seen + first[0], n = first[1] - first[0];
      parents[t] = n < 2 ? -1 : sees[n - 2];
      const int32_t *before = text->first + (n < 2 ? t : parents[t]), alike = n < 2 ? 0 : before[1] - before[0];
      if (n < 1 || sees[n - 1] != t || alike != n - 1 || memcmp(sees, text->seen + *before, size_t(alike) * 4) != 0)
        return refused(net, "a row of tree_mask does not see what its parent sees, and itself");
    }
    if (parents[t] >= 0) places[parents[t]] = 1;  // it has children
  }
  for (int without = 0; without < 2; without++)
    for (int64_t t = rows - 1; t >= 0; t--)
      if (places[t] != without) next[t] = child[parents[t]], child[parents[t]] = static_cast<int32_t>(t);
  int64_t kept = 0;
  for (int64_t i = 0, t = child[-1]; i < rows; i++) {
    order[i] = static_cast<int32_t>(t);
    const int32_t before = parents[t] < 0 ? 0 : places[parents[t]];
    places[t] = next[t] < 0 && before > 0 ? before : before + 1;  // the last child takes its parent's
    if (child[t] >= 0) {
      kept = places[t] > kept ? places[t] : kept;
      t = child[t];
      continue;
    }
    while (t >= 0 && next[t] < 0) t = parents[t];
    t = t < 0 ? t : next[t];
  }
  if (kept > MOST_KEPT) return refused(net, "a tree needs more than 64 states at once");
  text->preorder = {order, parents, places, kept};
  return nullptr;
}

void each_row(const void* texts, int64_t first, int64_t last, uint8_t*) {
  for (const Delta* j = static_cast<const Delta*>(texts); last > 0; j++) {
    const int64_t parts = j->key_heads + 1, pieces = (j->pending + j->rows) * parts;
    for (int64_t i = first < 0 ? 0 : first; i < last && i < pieces; i++)
      j->kernels->delta_row(*j, i / parts - j->pending, i % parts);
    first -= pieces, last -= pieces;
  }
}

void each_block(const void* texts, int64_t first, int64_t last, uint8_t* scratch) {
  const Delta* j = static_cast<const Delta*>(texts);
  const int64_t of_head = j->width / j->columns(), of_text = j->heads * of_head;
  for (int64_t i = first; i < last; i++)
    j->kernels->delta_block(j[i / of_text], i % of_text / of_head, i % of_head * j->columns(),
                            reinterpret_cast<float*>(scratch));
}

// The rows of text i among those of a pass, from this one on.
ort::Status narrow_to(int64_t row, int64_t i, Delta* job) {
  Delta& j = *job;
  Text own;
  RETURN_IF_ERROR(find_text(j.past_rows, j.past_state, j.past, i, &own));
  j.past = own.columns, j.pending = j.past - (j.tokens - 1);
  if (i > 0) j.new_state = reinterpret_cast<float*>(own.next);
  if (j.pending < 0 || j.past > (1 << 20) || j.new_state == nullptr)
    return refused(j, "a text was announced with too few past rows, or without memory for a new state");
  j.past_rows = reinterpret_cast<const float*>(own.keys), j.past_state = reinterpret_cast<const float*>(own.values);
  j.qkv += row * j.channels(), j.b += row * j.heads, j.a += row * j.heads;
  j.out += row * j.heads * j.width, j.new_rows += row * j.kept();
  return nullptr;
}

ort::Status plan(const void* what, Pass* pass) {
  Delta all = *static_cast<const Delta*>(what);
  const int less = !all.erases;
  const ort::Tensor &qkv = pass->input(QKV), &b = pass->input(B), &a = pass->input(A - less);
  const ort::Tensor &past_rows = pass->input(PAST_ROWS - less), &past_state = pass->input(PAST_STATE - less);
  const int64_t rows = qkv.rank == 3 ? qkv.dims[1] : 0, H = all.heads;
  if (rows < 1 || rows > (1 << 20) || !qkv.is(ort::FLOAT, 1, rows, all.channels()) || !b.is(ort::FLOAT, 1, rows, H) ||
      !a.is(ort::FLOAT, 1, rows, H))
    return refused(all, "qkv, b, a or dt have another shape or type");
  all.rows = rows, all.past = past_rows.dims[1], all.pending = all.past - (all.tokens - 1);
  if (all.pending < 0 || all.past > (1 << 20) || !past_rows.is(ort::FLOAT, 1, all.past, all.kept()) ||
      !past_state.is(ort::FLOAT, H, all.key_width, all.width))
    return refused(all, "past rows or the past state have another shape or type");
  bool several = false;
  RETURN_IF_ERROR(look(pass->input(POSITIONS - less), pass->input(MASK - less), rows, 0, pass, &several));
  const int64_t out[3] = {1, rows, H * all.width}, rows_out[3] = {1, rows, all.kept()};
  RETURN_IF_ERROR(pass->output(0, out, 3, &all.out));
  RETURN_IF_ERROR(pass->output(1, rows_out, 3, &all.new_rows));
  RETURN_IF_ERROR(pass->output(2, past_state.dims, 3, &all.new_state));
  all.qkv = static_cast<const float*>(qkv.data);
  all.b = static_cast<const float*>(b.data), all.a = static_cast<const float*>(a.data);
  all.past_rows = static_cast<const float*>(past_rows.data);
  all.past_state = static_cast<const float*>(past_state.data);

  const Visible& seen = pass->visible;
  Delta* texts = pass->memory.get_zeros<Delta>(static_cast<size_t>(seen.count));
  if (texts == nullptr) return ort::error(NO_MEMORY);
  int64_t lines = 0;
  for (int64_t i = 0; i < seen.count; i++) {
    Seen& text = seen.texts[i];
    RETURN_IF_ERROR(order_rows(all, &text, pass));
    Delta& j = texts[i] = all;
    j.rows = text.rows;
    RETURN_IF_ERROR(several ? narrow_to(text.row, i, &j) : nullptr);
    j.tree = text.preorder;
    const int64_t kept = j.tree.kept > 0 || j.pending < 2 ? j.tree.kept : 1;
    pass->needs(static_cast<size_t>(kept * j.key_width * j.columns()) * sizeof(float));
    lines += j.pending + j.rows;
  }
  float* ready =
      reinterpret_cast<float*>(pass->memory_at(&pass->work, static_cast<size_t>(lines * all.line()) * sizeof(float)));
  if (ready == nullptr) return ort::error(NO_MEMORY);
  for (int64_t i = 0; i < seen.count; i++)
    texts[i].ready = ready, ready += (texts[i].pending + texts[i].rows) * all.line();
  pass->add(each_row, texts, lines * (all.key_heads + 1), lines * all.channels() < MANY);
  pass->add(each_block, texts, seen.count * H * (all.width / all.columns()),
            lines * H * all.key_width * all.width < FEW);
  return nullptr;
}
}  // namespace

const Kind DELTA = {SKIPS, [](int i) { return i < WEIGHTS; }, create_kind<Delta, read<true>>, plan};
const Kind SCAN = {SKIPS + 1, [](int i) { return i < WEIGHTS - 1; }, create_kind<Delta, read<false>>, plan};
}  // namespace eagle
