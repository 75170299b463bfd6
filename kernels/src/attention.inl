// Attention over eight lanes at a time. Included once per instruction set, after lanes.hpp.

constexpr float LOWEST = -3.0e38f;
constexpr int64_t KEYS_AHEAD = 16, VALUES_AHEAD = 24, LINE_OF_CACHE = 64;  // columns that are fetched early; bytes
constexpr int64_t WIDENED = 9;                                             // rows for which a key is made fp32 once
constexpr int64_t LINE = BLOCK + 8;  // scores of a row; a few beyond the last may be written
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t within(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// Scores of M queries with four keys: per lane one chain of multiply-adds over the width, then four_sums. out [M, stride]
template <int M, class K>
static inline void score_tile(const float* q, int64_t apart, const K* const* keys, int64_t width, float* out,
                              int64_t stride) {
  V sums[M][4];
  UNROLLED for (int i = 0; i < M; i++) UNROLLED for (int c = 0; c < 4; c++) sums[i][c] = all(0.f);
  for (int64_t d = 0; d < width; d += 8) {
    V query[M];
    UNROLLED for (int i = 0; i < M; i++) query[i] = load(q + i * apart + d);
    UNROLLED for (int c = 0; c < 4; c++) {
      const V key = load(keys[c] + d);
      UNROLLED for (int i = 0; i < M; i++) sums[i][c] = fma(query[i], key, sums[i][c]);
    }
  }
  UNROLLED for (int i = 0; i < M; i++) four_sums(sums[i][0], sums[i][1], sums[i][2], sums[i][3], out + i * stride);
}

// Multiplies numbers [rows, LINE] of `count` columns by the columns' scales, if the cache has some; at, which: as in
// `scores`. weights: a 0 stays 0, whatever the scale, since its row does not see the column.
template <bool weights, class B>
static void by_scales(const Attention& job, float* s, int64_t rows, const B* at, int64_t apart, const int32_t* which,
                      int64_t count) {
  if (sizeof(B) > 1) return;
  float scales[LINE];
  for (int64_t c = 0; c < count; c++) memcpy(scales + c, at + (which ? which[c] : c) * apart + job.width, SCALE);
  for (int64_t c = count; c < count + 8; c++) scales[c] = 1;  // others may follow in s
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < count; c += 8) {
      const V number = load(s + r * LINE + c), scaled = mul(number, load(scales + c));
      store(s + r * LINE + c, weights ? at_sign(sub(all(0.f), number), all(0.f), scaled) : scaled);
    }
}

// The same of any number of rows.
template <class K>
static inline void score_rows(const float* q, int64_t rows, const K* const* keys, int64_t width, float* out) {
  int64_t r = 0;
  for (; r + 3 <= rows; r += 3) score_tile<3>(q + r * width, width, keys, width, out + r * LINE, LINE);
  if (rows - r == 2) score_tile<2>(q + r * width, width, keys, width, out + r * LINE, LINE);
  if (rows - r == 1) score_tile<1>(q + r * width, width, keys, width, out + r * LINE, LINE);
}

// Scores of queries [rows, width] with `count` keys: key i lies at keys + which[i] * apart, or at keys + i * apart. out
// [rows, LINE]; up to three values beyond `count` are overwritten.
template <class K>
static void scores(const Attention& job, const float* q, int64_t rows, const K* keys, int64_t apart,
                   const int32_t* which, int64_t count, float* out) {
  const int64_t width = job.width;
  for (int64_t c = 0; c < count; c += 4) {
    const K* four[4];
    for (int64_t i = 0; i < 4; i++) {
      const int64_t column = smaller(c + i, count - 1);
      four[i] = keys + (which ? which[column] : column) * apart;
    }
    if (which == nullptr)
      for (int64_t i = 0; i < 4 * apart; i += LINE_OF_CACHE / int64_t(sizeof(K)))
        __builtin_prefetch(keys + (c + KEYS_AHEAD) * apart + i);
    if (sizeof(K) == sizeof(float) || rows < WIDENED) {
      score_rows(q, rows, four, width, out + c);
      continue;
    }
    float wide[4 * MOST_WIDTH];  // keys that many rows read are made fp32 once
    for (int64_t i = 0; i < 4; i++)
      for (int64_t d = 0; d < width; d += 8) store(wide + i * width + d, load(four[i] + d));
    const float* const widened[4] = {wide, wide + width, wide + 2 * width, wide + 3 * width};
    score_rows(q, rows, widened, width, out + c);
  }
  by_scales<false>(job, out, rows, keys, apart, which, count);
}

// out [M, width] (+)= weights [M, LINE] times values, 8 W of the width: each element is one chain over the columns.
template <int M, int W, class B>
static inline void mix_tile(const float* weights, const B* const* values, int64_t apart, const int32_t* which,
                            int64_t count, float* out, int64_t width, bool more) {
  V sums[M][W];
  UNROLLED for (int i = 0; i < M; i++) UNROLLED for (int w = 0; w < W; w++) sums[i][w] =
      more ? load(out + i * width + 8 * w) : all(0.f);
  for (int64_t c = 0; c < count; c++) {
    const int64_t at = (which ? which[c] : c) * apart;
    V value[W];
    UNROLLED for (int w = 0; w < W; w++) value[w] = load(values[w] + at);
    UNROLLED for (int w = 0; w < W; w += 2) __builtin_prefetch(values[w] + at + VALUES_AHEAD * apart);
    UNROLLED for (int i = 0; i < M; i++) {
      const V weight = all(weights[i * LINE + c]);
      UNROLLED for (int w = 0; w < W; w++) sums[i][w] = fma(weight, value[w], sums[i][w]);
    }
  }
  UNROLLED for (int i = 0; i < M; i++) UNROLLED for (int w = 0; w < W; w++) store(out + i * width + 8 * w, sums[i][w]);
}
template <int M, class B>
static void mix_rows(const Attention& job, const float* weights, const B* values, int64_t cut, int64_t piece,
                     int64_t apart, const int32_t* which, int64_t count, float* out, bool more) {
  const int64_t width = job.width;
  const B* places[4];
  int64_t d = 0;
  constexpr int W = M <= 3 ? 4 : 2;
  for (; d + 8 * W <= width; d += 8 * W) {
    for (int w = 0; w < W; w++) places[w] = values + (d + 8 * w) / cut * piece + (d + 8 * w) % cut;
    mix_tile<M, W>(weights, places, apart, which, count, out + d, width, more);
  }
  for (; d < width; d += 8) {
    places[0] = values + d / cut * piece + d % cut;
    mix_tile<M, 1>(weights, places, apart, which, count, out + d, width, more);
  }
}
// Values of column c and place d lie at values + d / cut * piece + c * apart + d % cut, with which[c] for c if given. Weights are
// multiplied by the values' scales, if there are some.
template <class B>
static void mix(const Attention& job, float* weights, int64_t rows, const B* values, int64_t cut, int64_t piece,
                int64_t apart, const int32_t* which, int64_t count, float* out, bool more) {
  by_scales<true>(job, weights, rows, values, apart, which, count);
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6)
    mix_rows<6>(job, weights + r * LINE, values, cut, piece, apart, which, count, out + r * job.width, more);
  for (; r + 3 <= rows; r += 3)
    mix_rows<3>(job, weights + r * LINE, values, cut, piece, apart, which, count, out + r * job.width, more);
  for (; r < rows; r++)
    mix_rows<1>(job, weights + r * LINE, values, cut, piece, apart, which, count, out + r * job.width, more);
}

// The nearest values that fp16 has; beyond its range the largest.
static void as_in_cache(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) store(x + i, halved(at_most(larger(load(x + i), all(-65504.f)), 65504.f)));
}

// A row of a cache of bytes: x to the nearest of 127 steps up to the largest absolute value, on either side of zero.
static void to_bytes(const float* x, int64_t n, float* row) {
  int8_t* bytes = reinterpret_cast<int8_t*>(row);
  float scale;
  int32_t sum;
  quantise(x, n, n, 1, bytes, &scale, &sum);
  memcpy(bytes + n, &scale, SCALE);
}

// Puts the key and the value of row t in the column of the cache that follows the committed ones and the rows before.
template <typename T>
static void write_row(const Attention& job, int64_t h, int64_t t) {
  const int64_t row = (t * job.kv_heads + h) * job.row, column = job.committed + t;
  T* key = static_cast<T*>(const_cast<void*>(job.past_keys)) + h * job.key_head + column * job.key_column;
  T* value = static_cast<T*>(const_cast<void*>(job.past_values)) + h * job.value_head + column * job.value_column;
  if constexpr (sizeof(T) == 1) {
    memcpy(key, job.new_keys + row, static_cast<size_t>(job.key_column));
    memcpy(value, job.new_values + row, static_cast<size_t>(job.value_column));
  } else {
    for (int64_t d = 0; d < job.width; d += 8) {
      store(key + d, load(job.new_keys + row + d));
      store(value + d / job.cut * job.value_piece + d % job.cut, load(job.new_values + row + d));
    }
  }
}

// Rotates and scales the queries of one kv head, rotates its new keys, and copies its new values.
static void prepare(const Attention& job, int64_t h) {
  const int64_t D = job.width, half = job.turned / 2, sharing = job.sharing();
  for (int64_t t = 0; t < job.rows; t++) {
    auto rotated = [&](const float* x, float* y, float scale) {
      const float *c = job.cosine + t * half, *s = job.sine + t * half;
      for (int64_t d = 0; d < half; d += 8) {
        const V a = load(x + d), b = load(x + half + d), cosine = load(c + d), sine = load(s + d);
        store(y + d, mul(sub(mul(a, cosine), mul(b, sine)), all(scale)));
        store(y + half + d, mul(add(mul(a, sine), mul(b, cosine)), all(scale)));
      }
      for (int64_t d = job.turned; d < D; d += 8) store(y + d, mul(load(x + d), all(scale)));
    };
    for (int64_t g = 0; g < sharing; g++)
      rotated(job.q + (t * job.heads + h * sharing + g) * D, job.queries + ((h * job.rows + t) * sharing + g) * D,
              job.scale);
    const int64_t from = (t * job.kv_heads + h) * D, row = ((job.earlier + t) * job.kv_heads + h) * job.row;
    float turned[MOST_WIDTH], *new_key = job.new_keys + row, *new_value = job.new_values + row;
    rotated(job.k + from, job.numbers == BYTES ? turned : new_key, 1.f);
    if (job.numbers == BYTES) to_bytes(turned, D, new_key), to_bytes(job.v + from, D, new_value);
    else memcpy(new_value, job.v + from, static_cast<size_t>(D) * 4);
    if (job.numbers == HALF) as_in_cache(new_key, D), as_in_cache(new_value, D);
    if (!job.writes) continue;
    if (job.numbers == BYTES) write_row<int8_t>(job, h, t);
    else if (job.numbers == HALF) write_row<uint16_t>(job, h, t);
    else write_row<float>(job, h, t);
  }
}

struct Sums {
  float *top, *total, *mixed;
};  // [rows], [rows], [rows, D]; top is LOWEST of a row that has seen nothing

// Adds sums over later columns to those over earlier ones.
static inline void fold(int64_t width, float& top, float& total, float* mixed, float top2, float total2,
                        const float* mixed2) {
  if (top2 <= LOWEST) return;
  if (top <= LOWEST) {
    top = top2;
    total = total2;
    memcpy(mixed, mixed2, static_cast<size_t>(width) * 4);
    return;
  }
  const float m = top > top2 ? top : top2;
  const V a = all(exponential(top - m)), b = all(exponential(top2 - m));
  total = first_of(fma(all(total), a, mul(all(total2), b)));
  top = m;
  for (int64_t d = 0; d < width; d += 8) store(mixed + d, fma(load(mixed + d), a, mul(load(mixed2 + d), b)));
}

// cap * tanh(s / cap) of n8 scores, a multiple of 8.
static void bound(float* s, int64_t n8, float cap) {
  for (int64_t i = 0; i < n8; i += 8) {
    const V x = load(s + i), t = exponential(mul(absolute(x), all(-2.f / cap)));
    store(s + i, with_sign(mul(all(cap), div(sub(all(1.f), t), add(all(1.f), t))), x));
  }
}

// Makes weights of the scores of one row over one block: n numbers from `start`, of which the first `old` are committed
// columns. Returns whether it sees any. which: as in `scores`, of the new ones.
static bool weigh(const Attention& job, int64_t t, float* s, int64_t start, int64_t old, int64_t n,
                  const int32_t* which, int64_t from, float& top, float& total) {
  const int64_t n8 = (n + 7) / 8 * 8;
  const int64_t oldest = job.window ? job.positions[t] - job.window + 1 : 0;
  auto hidden = [&](int64_t i) {
    if (job.window == 0) return false;
    if (i < old) return start + i < oldest;
    return job.positions[which ? which[i - old] : from + i - old] < oldest;
  };
  for (int64_t i = n; i < n8; i++) s[i] = LOWEST;
  if (job.cap > 0) bound(s, n8, job.cap);
  for (int64_t i = n; i < n8; i++) s[i] = LOWEST;
  if (job.window)
    for (int64_t i = 0; i < n; i++)
      if (hidden(i)) s[i] = LOWEST;
  V m = load(s);
  for (int64_t i = 8; i < n8; i += 8) m = larger(m, load(s + i));
  top = largest_of(m);
  if (top <= LOWEST) {
    memset(s, 0, static_cast<size_t>(n8) * 4);
    return false;
  }
  for (int64_t i = 0; i < n8; i += 8) store(s + i, exponential(sub(load(s + i), all(top))));
  for (int64_t i = n; i < n8; i++) s[i] = 0;
  if (job.window)
    for (int64_t i = 0; i < n; i++)
      if (hidden(i)) s[i] = 0;
  V sum = load(s);
  for (int64_t i = 8; i < n8; i += 8) sum = add(sum, load(s + i));
  total = sum_of(sum);
  return true;
}

// Sums over one group of visible columns, for rows first .. last - 1 of one kv head.
template <class B, class New>
static void group_sums(const Attention& job, int64_t h, int64_t first, int64_t last, int64_t group, Sums out,
                       float* work) {
  const int64_t D = job.width, sharing = job.sharing(), rows = (last - first) * sharing;
  const int64_t row = sizeof(New) == 1 ? D + SCALE : D, apart = job.kv_heads * row;
  float *S = work, *O = S + rows * LINE, *tops = O + rows * D, *totals = tops + rows;
  const float* Q = job.queries + (h * job.rows + first) * sharing * D;
  const B* keys = static_cast<const B*>(job.past_keys) + h * job.key_head;
  const B* values = static_cast<const B*>(job.past_values) + h * job.value_head;
  const New* new_keys = reinterpret_cast<const New*>(job.new_keys) + h * row;
  const New* new_values = reinterpret_cast<const New*>(job.new_values) + h * row;
  const int64_t longest = job.chain ? last : job.longest;
  int64_t oldest = INT64_MAX;  // position that a row sees
  for (int64_t t = first; t < last && job.window; t++) oldest = smaller(oldest, job.positions[t] - job.window + 1);
  for (int64_t r = 0; r < rows; r++) out.top[r] = LOWEST;
  for (int64_t start = group * GROUP; start < (group + 1) * GROUP; start += BLOCK) {
    const int64_t old = within(job.committed - start, 0, BLOCK), from = within(start - job.committed, 0, INT64_MAX);
    const int64_t fits = within(longest - from, 0, BLOCK - old);
    if (old + fits == 0) break;
    if (job.window && old == BLOCK && start + BLOCK <= oldest) continue;  // no row sees any of it
    auto mine = [&](int64_t t) { return within(job.visible(t) - from, 0, BLOCK - old); };
    auto list = [&](int64_t t) { return job.seen + job.first[t] + from; };
    if (old) scores(job, Q, rows, keys + start * job.key_column, job.key_column, nullptr, old, S);
    if (fits && job.chain) scores(job, Q, rows, new_keys + from * apart, apart, nullptr, fits, S + old);
    if (fits && !job.chain)
      for (int64_t t = first; t < last; t++)
        if (mine(t)) {
          const int64_t r = (t - first) * sharing;
          scores(job, Q + r * D, sharing, new_keys, apart, list(t), mine(t), S + r * LINE + old);
        }
    for (int64_t r = 0; r < rows; r++) {
      const int64_t t = first + r / sharing, n = old + mine(t);
      float* s = S + r * LINE;
      tops[r] = LOWEST;
      if (n) weigh(job, t, s, start, old, n, job.chain ? nullptr : list(t), from, tops[r], totals[r]);
      for (int64_t i = n; i < old + fits; i++) s[i] = 0;
    }
    mix(job, S, rows, values + start * job.value_column, job.cut, job.value_piece, job.value_column, nullptr, old, O,
        false);
    if (fits && job.chain) mix(job, S + old, rows, new_values + from * apart, D, 0, apart, nullptr, fits, O, true);
    if (fits && !job.chain)
      for (int64_t t = first; t < last; t++) {
        const int64_t r = (t - first) * sharing;
        mix(job, S + r * LINE + old, sharing, new_values, D, 0, apart, list(t), mine(t), O + r * D, true);
      }
    for (int64_t r = 0; r < rows; r++)
      fold(D, out.top[r], out.total[r], out.mixed + r * D, tops[r], totals[r], O + r * D);
  }
}
static void group_sums_of(const Attention& job, int64_t h, int64_t first, int64_t last, int64_t group, Sums out,
                          float* work) {
  if (job.numbers == BYTES) group_sums<int8_t, int8_t>(job, h, first, last, group, out, work);
  else if (job.numbers == HALF) group_sums<uint16_t, float>(job, h, first, last, group, out, work);
  else group_sums<float, float>(job, h, first, last, group, out, work);
}

static size_t scratch(const Attention& job, int64_t rows) {
  return static_cast<size_t>(rows * job.sharing() * (LINE + 3 * job.width + 8) + 64);
}

// One group for all rows, to job.parts.
static void part(const Attention& job, int64_t h, int64_t group, float* work) {
  const int64_t rows = job.rows * job.sharing();
  float* p = job.parts + (h * job.groups + group) * rows * (job.width + 2);
  group_sums_of(job, h, 0, job.rows, group, {p, p + rows, p + 2 * rows}, work);
}

static void finish(const Attention& job, int64_t h, int64_t row, float top, float total, const float* mixed) {
  const int64_t sharing = job.sharing(), D = job.width;
  float* out = job.out + (row / sharing * job.heads + h * sharing + row % sharing) * D;
  if (top <= LOWEST) {  // it has seen nothing
    memset(out, 0, static_cast<size_t>(D) * 4);
    return;
  }
  if (job.sinks == nullptr) {
    for (int64_t d = 0; d < D; d += 8) store(out + d, div(load(mixed + d), all(total)));
    return;
  }
  const float sink = job.sinks[h * sharing + row % sharing], m = top > sink ? top : sink;
  const V kept = all(exponential(top - m)), sum = fma(all(total), kept, all(exponential(sink - m)));
  for (int64_t d = 0; d < D; d += 8) store(out + d, div(mul(load(mixed + d), kept), sum));
}

// Folds the parts of one kv head.
static void join(const Attention& job, int64_t h) {
  const int64_t rows = job.rows * job.sharing(), D = job.width, size = rows * (D + 2);
  float* base = job.parts + h * job.groups * size;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t g = 1; g < job.groups; g++) {
      const float* p = base + g * size;
      fold(D, base[r], base[rows + r], base + 2 * rows + r * D, p[r], p[rows + r], p + 2 * rows + r * D);
    }
    finish(job, h, r, base[r], base[rows + r], base + 2 * rows + r * D);
  }
}

// All groups for some rows.
static void whole_rows(const Attention& job, int64_t h, int64_t first, int64_t last, float* work) {
  const int64_t rows = (last - first) * job.sharing(), D = job.width;
  float* sum = work + rows * (LINE + D + 2);
  float* one = sum + rows * (D + 2);
  const Sums all_groups{sum, sum + rows, sum + 2 * rows}, each{one, one + rows, one + 2 * rows};
  for (int64_t r = 0; r < rows; r++) all_groups.top[r] = LOWEST;
  for (int64_t g = 0; g < job.groups; g++) {
    group_sums_of(job, h, first, last, g, each, work);
    for (int64_t r = 0; r < rows; r++)
      fold(D, all_groups.top[r], all_groups.total[r], all_groups.mixed + r * D, each.top[r], each.total[r],
           each.mixed + r * D);
  }
  for (int64_t r = 0; r < rows; r++)
    finish(job, h, first * job.sharing() + r, all_groups.top[r], all_groups.total[r], all_groups.mixed + r * D);
}
