// RowExactExperts, a step of RowExactSteps: a mixture of gated MLPs, of which a row is sent to some.
//
//   inputs    x [.., H] fp32; shares [.., E] fp32, which the node gets: 0 for the experts that a row does not have; added
//             [.., H] fp32 or nothing; grids [3 * E, 2] int64, an initializer: bits and block of each weight. The node's
//             9 * E inputs after grids are those weights, of each expert gate [I, H], up [I, H] and down [H, I], as
//             levels, steps and zero levels of RowExactMatMul; with biases 3 * E more follow, of each expert those of
//             gate, up and down, fp32
//   output    as x: ((0 + a) + b) + ... + added, with a, b, ... share * down(activation(gate(x)) * up(x)) of the row's
//             experts, in ascending order
//   attributes  H; I; activation (1: SiLU, 2: GELU by tanh, 3: see BOUNDED, 4: sigmoid); alpha, limit, of the last; biases (0 or 1)
//
// So a row's bits depend on the row. An expert without rows is not read. Rows of one expert make tiles of their own.
#include <string.h>

#include "product.hpp"

namespace eagle {
namespace {
constexpr int SHARES = 1, ADDED = 2, GRIDS = 3, INPUTS = 4;  // places of inputs
constexpr int64_t MOST_EXPERTS = 4096, WIDEST = 1 << 24;
constexpr int64_t TOGETHER = 512;  // outputs of a row that one thread adds up at a time

struct Expert {
  Product in, out;  // gate and up; down
};
struct Experts {
  int64_t count = 0, hidden = 0, width = 0;
  Expert* each = nullptr;
};

ort::Status read(const Source& source, Experts* all) {
  int64_t hidden = 0, width = 0, biases = 0;
  Before gates;
  const bool named = source.attribute("H", &hidden) && source.attribute("I", &width);
  source.attribute("biases", &biases);
  const bool gated = read_activation(source, &gates) && gates.activation != NONE;
  ort::Tensor grids;
  RETURN_IF_ERROR(source.constant(GRIDS, &grids));
  const int64_t count = grids.dims[0] / 3;
  if (!named || hidden < 8 || hidden > WIDEST || hidden % 8 || width < 8 || width > WIDEST || width % 8 || count < 1 ||
      count > MOST_EXPERTS || !grids.is(ort::INT64, 3 * count, 2) || !gated || biases < 0 || biases > 1)
    return ort::error("RowExactExperts: H, I, activation, biases or grids have a value or shape that is not known");
  const int64_t first = source.places[GRIDS] + 1;
  size_t given = 0;
  RETURN_IF_ERROR(ort::call(ort::INFO_INPUT_COUNT, source.info, &given));
  if (size_t(first + (biases ? 12 : 9) * count) > given) return ort::error("RowExactExperts: weights are missing");
  all->each = source.memory->make<Expert>(size_t(count));
  if (all->each == nullptr) return ort::error(NO_MEMORY);
  all->count = count, all->hidden = hidden, all->width = width;
  const Kernels& kernels = chosen();
  const int64_t* grid = static_cast<const int64_t*>(grids.data);
  for (int64_t e = 0; e < count; e++) {
    Expert& expert = all->each[e];
    expert.in.kernels = expert.out.kernels = &kernels;
    expert.in.count = 2, expert.out.count = 1;
    expert.out.before = gates;
    for (int i = 0; i < 3; i++, grid += 2) {
      Stored stored;
      ort::Tensor* const parts[] = {&stored.levels, &stored.steps, &stored.zeros};
      for (int part = 0; part < 3; part++) {
        RETURN_IF_ERROR(ort::constant(source.info, size_t(first + 9 * e + 3 * i + part), parts[part]));
        if (parts[part]->data == nullptr) return ort::error("RowExactExperts: a weight is empty");
      }
      Weight* weight = i < 2 ? &expert.in.weights[i] : &expert.out.weights[0];
      RETURN_IF_ERROR(read_weight(stored, grid[0], grid[1], 0, i < 2 ? hidden : width, i < 2 ? width : hidden, kernels,
                                  source.weights, weight));
      if (biases == 0) continue;
      ort::Tensor bias;
      RETURN_IF_ERROR(ort::constant(source.info, size_t(first + 9 * count + 3 * e + i), &bias));
      if (bias.data == nullptr) return ort::error("RowExactExperts: a bias is empty");
      RETURN_IF_ERROR(copy_numbers(source, bias, weight->columns, "RowExactExperts: a bias has another shape or type",
                                   i < 2 ? &expert.in.biases[i] : &expert.out.biases[0]));
    }
  }
  return nullptr;
}

// One phase of several products. ends: the number of the piece after each product's last.
struct Several {
  const Work* works;
  const int64_t* ends;
  void (*run)(const void*, int64_t, int64_t, uint8_t*);
};

void several(const void* work, int64_t first, int64_t last, uint8_t* scratch) {
  const Several& all = *static_cast<const Several*>(work);
  for (int64_t i = 0, begin = 0; begin < last; begin = all.ends[i++]) {
    const int64_t end = all.ends[i];
    if (first < end)
      all.run(&all.works[i], first > begin ? first - begin : 0, (last < end ? last : end) - begin, scratch);
  }
}

struct Mixed {  // of one pass
  const float *outs, *added, *shares;
  const int32_t *first, *which, *expert;  // of row t: which[first[t]] .. which[first[t + 1] - 1], rows of `outs`
  int64_t hidden, experts, parts;
  float* out;
};

// Adds up some parts of rows.
void mix(const void* work, int64_t from, int64_t to, uint8_t*) {
  const Mixed& m = *static_cast<const Mixed*>(work);
  for (int64_t piece = from; piece < to; piece++) {
    const int64_t t = piece / m.parts, begin = piece % m.parts * TOGETHER;
    const int64_t end = begin + TOGETHER < m.hidden ? begin + TOGETHER : m.hidden;
    float* out = m.out + t * m.hidden;
    for (int64_t i = begin; i < end; i++) out[i] = 0.f;
    for (int32_t n = m.first[t]; n < m.first[t + 1]; n++) {
      const float* one = m.outs + m.which[n] * m.hidden;
      const float share = m.shares[t * m.experts + m.expert[n]];
      for (int64_t i = begin; i < end; i++) out[i] += share * one[i];
    }
    if (m.added != nullptr)
      for (int64_t i = begin; i < end; i++) out[i] += m.added[t * m.hidden + i];
  }
}

// Which rows each expert has, and where a row's experts put what they compute.
struct Routes {
  int64_t total, used;              // rows of all experts; experts with rows
  int32_t *begin, *rows;            // rows of expert e: rows[begin[e]] .. rows[begin[e + 1] - 1]
  int32_t *first, *which, *expert;  // see Mixed
};

bool route(const float* shares, int64_t rows, int64_t experts, Pass* pass, Routes* r) {
  *r = {};
  int32_t* next = pass->memory.get_zeros<int32_t>(size_t(rows) + 1);  // of a row's experts
  r->begin = pass->memory.get_zeros<int32_t>(size_t(experts) + 1);
  r->first = pass->memory.get_zeros<int32_t>(size_t(rows) + 1);
  if (next == nullptr || r->begin == nullptr || r->first == nullptr) return false;
  for (int64_t t = 0; t < rows; t++) {
    r->first[t + 1] = next[t] = r->first[t];
    for (int64_t e = 0; e < experts; e++) r->first[t + 1] += shares[t * experts + e] != 0.f;
  }
  r->total = r->first[rows];
  r->rows = pass->memory.get_zeros<int32_t>(size_t(r->total) + 1);
  r->which = pass->memory.get_zeros<int32_t>(size_t(r->total) + 1);
  r->expert = pass->memory.get_zeros<int32_t>(size_t(r->total) + 1);
  if (r->rows == nullptr || r->which == nullptr || r->expert == nullptr) return false;
  for (int64_t e = 0; e < experts; e++) {
    int32_t at = r->begin[e];
    for (int64_t t = 0; t < rows; t++)
      if (shares[t * experts + e] != 0.f) {
        r->expert[next[t]] = static_cast<int32_t>(e), r->rows[at] = static_cast<int32_t>(t);
        r->which[next[t]++] = at++;
      }
    r->begin[e + 1] = at;
    r->used += at > r->begin[e];
  }
  return true;
}

// Adds the two phases of some products: they quantise inputs and multiply. cost: of quantising one, see GATED.
bool add_products(const Work* works, int64_t count, int64_t channels, int64_t cost, int64_t rows, Pass* pass) {
  Several* phases = pass->memory.get_zeros<Several>(2);
  int64_t* ends = pass->memory.get_zeros<int64_t>(2 * size_t(count));
  if (phases == nullptr || ends == nullptr) return false;
  int64_t pieces = 0, panels = 0;
  for (int64_t i = 0; i < count; i++) {
    ends[i] = pieces += pieces_of_inputs(works[i]);
    ends[count + i] = panels += works[i].total;
  }
  phases[0] = {works, ends, read_tiles};
  phases[1] = {works, ends + count, multiply};
  const Weight& w = works[0].product->weights[0];
  pass->add(several, &phases[0], pieces, rows * channels * cost < MANY || pieces == 1);
  pass->add(several, &phases[1], panels, panels * PANEL * channels < FEW, w.levels, w.panels * w.panel_bytes());
  return true;
}

ort::Status add_phases(const Experts& all, const Routes& routes, const float* x, Mixed* mixed, int64_t rows,
                       Pass* pass) {
  const int64_t used = routes.used, total = routes.total;
  Work *in = pass->memory.get_zeros<Work>(size_t(used) + 1), *out = pass->memory.get_zeros<Work>(size_t(used) + 1);
  if (in == nullptr || out == nullptr) return ort::error(NO_MEMORY);
  const size_t inner = rounded(size_t(total * all.width) * 4);
  size_t needed = 2 * inner + rounded(size_t(total * all.hidden) * 4);
  int64_t n = 0;
  for (int64_t e = 0; e < all.count; e++) {
    const int32_t begin = routes.begin[e], count = routes.begin[e + 1] - begin;
    if (count == 0) continue;
    in[n].product = &all.each[e].in, out[n].product = &all.each[e].out;
    in[n].x = x, in[n].which = routes.rows + begin;
    in[n].rows = out[n].rows = count;
    needed += find_inputs(&in[n], pass) + find_inputs(&out[n], pass);
    n++;
  }
  uint8_t* memory = pass->memory_at(&pass->work, needed);
  if (memory == nullptr) return ort::error(NO_MEMORY);
  float *gates = reinterpret_cast<float*>(memory), *ups = reinterpret_cast<float*>(memory + inner);
  float* outs = reinterpret_cast<float*>(memory + 2 * inner);
  mixed->outs = outs;
  memory += 2 * inner + rounded(size_t(total * all.hidden) * 4);
  for (int64_t i = 0; i < used; i++) {
    memory = place_inputs(&out[i], place_inputs(&in[i], memory));
    in[i].out[0] = gates, in[i].out[1] = ups, out[i].out[0] = outs;
    out[i].x = gates, out[i].up = ups;
    gates += in[i].rows * all.width, ups += in[i].rows * all.width, outs += in[i].rows * all.hidden;
  }
  if (used > 0 &&
      !(add_products(in, used, all.hidden, 1, total, pass) && add_products(out, used, all.width, GATED, total, pass)))
    return ort::error(NO_MEMORY);
  pass->add(mix, mixed, rows * mixed->parts, total * all.hidden < MANY);
  return nullptr;
}

ort::Status plan(const void* what, Pass* pass) {
  const Experts& all = *static_cast<const Experts*>(what);
  const ort::Tensor &x = pass->input(0), &shares = pass->input(SHARES), &added = pass->input(ADDED);
  if (!x.is_rows(all.hidden)) return ort::error("RowExactExperts: x is not fp32 with H as its last dimension");
  const int64_t rows = x.count() / all.hidden;
  if (pass->step->in[SHARES] >= pass->given || !shares.is_rows(all.count) || shares.count() != rows * all.count ||
      rows * all.count > INT32_MAX)
    return ort::error("RowExactExperts: shares are not fp32 of each row and expert, or not an input of the node");
  if (!added.is_absent_or(x.count())) return ort::error("RowExactExperts: added has another shape or type");
  Mixed* mixed = pass->memory.get_zeros<Mixed>(1);
  Routes routes;
  const float* of_rows = static_cast<const float*>(shares.data);
  if (mixed == nullptr || !route(of_rows, rows, all.count, pass, &routes)) return ort::error(NO_MEMORY);
  *mixed = {
      nullptr,   static_cast<const float*>(added.data),  of_rows, routes.first, routes.which, routes.expert, all.hidden,
      all.count, (all.hidden + TOGETHER - 1) / TOGETHER, nullptr};
  RETURN_IF_ERROR(pass->output(0, x.dims, x.rank, &mixed->out));
  if (rows == 0) return nullptr;
  return add_phases(all, routes, static_cast<const float*>(x.data), mixed, rows, pass);
}
}  // namespace

const Kind EXPERTS = {INPUTS, [](int i) { return i < GRIDS; }, create_kind<Experts, read>, plan};
}  // namespace eagle
