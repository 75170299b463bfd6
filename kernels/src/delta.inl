// Gated delta nets and state spaces, eight numbers at a time. Included once per instruction set, after rows.inl.
//
// A ready line: q of all key heads, k, v; beta of all heads, filled up, decay alike; k times q of all key heads.
// Of a state space beta is the step.

static inline V softplus(V x) {  // log(1 + e^x): the larger of 0 and x, and log1p(t) = 2 atanh(t / (2 + t)), t <= 1
  const V t = exponential(sub(all(0.f), absolute(x)));
  const V s = div(t, add(all(2.f), t)), square = mul(s, s);
  V y = all(1.f / 15);
  for (int n = 13; n > 0; n -= 2) y = fma(y, square, all(1.f / static_cast<float>(n)));
  return fma(add(s, s), y, larger(all(0.f), x));
}

static inline float* line_of(const Delta& job, int64_t row) { return job.ready + (job.pending + row) * job.line(); }
static inline const float* kept_of(const Delta& job, int64_t row) {  // of the past
  return job.past_rows + (job.past + row) * job.kept();
}

// beta and decay of a row's heads.
static void gates(const Delta& job, int64_t row) {
  const int64_t H = job.heads, C = job.channels(), apart = job.kept() - C - H;
  const float* b = row < 0 ? kept_of(job, row) + C : job.b + row * H;
  const float* a = row < 0 ? b + apart : job.a + row * H;
  float* beta = line_of(job, row) + C;
  for (int64_t h = 0; h < H; h += 8) {
    float of_b[8] = {}, of_a[8] = {};
    const size_t bytes = static_cast<size_t>(smaller(8, H - h)) * 4;
    memcpy(of_b, b + h, bytes), memcpy(of_a, a + h, bytes);
    const V step = softplus(add(load(of_a), load(job.biases + h)));
    store(beta + h, job.erases ? sigmoid(load(of_b)) : step);
    store(beta + job.filled() + h, exponential(sub(all(0.f), mul(load(job.rates + h), step))));
  }
  if (row < 0) return;
  float* kept = job.new_rows + row * job.kept() + C;
  memcpy(kept, b, static_cast<size_t>(H) * 4), memcpy(kept + apart, a, static_cast<size_t>(H) * 4);
}

// The convolution of n of a row's channels, and what is kept of them.
static void convolve_channels(const Delta& job, int64_t row, int64_t first, int64_t n) {
  const int64_t C = job.channels();
  const float* tokens[MOST_TOKENS];
  int64_t from = row;
  for (int64_t back = 0; back < job.tokens; back++, from = job.before(from))
    tokens[back] = from < 0 ? kept_of(job, from) : job.qkv + from * C;
  float *out = line_of(job, row), *kept = row < 0 ? nullptr : job.new_rows + row * job.kept();
  for (int64_t c = first; c < first + n; c += 8) {
    V x = load(tokens[0] + c);
    if (kept != nullptr) store(kept + c, x);
    x = mul(load(job.weights + c), x);
    for (int64_t back = 1; back < job.tokens; back++)
      x = fma(load(job.weights + back * C + c), load(tokens[back] + c), x);
    if (!job.erases) x = add(x, load(job.offsets + c));
    store(out + c, mul(x, sigmoid(x)));
  }
}

static void delta_row(const Delta& job, int64_t row, int64_t part) {
  if (part == job.key_heads) return gates(job, row);
  const int64_t D = job.key_width, keys = job.key_heads * D, values = job.sharing() * job.width;
  float *line = line_of(job, row), *k = line + keys + part * D, *q = row < 0 ? k : k - keys;  // of the past none reads
  if (row >= 0) convolve_channels(job, row, part * D, D);
  convolve_channels(job, row, keys + part * D, D);
  convolve_channels(job, row, 2 * keys + part * values, values);
  V of_q = all(0.f), of_k = all(0.f), both = all(0.f);
  for (int64_t d = 0; d < D && job.erases; d += 8)
    of_q = fma(load(q + d), load(q + d), of_q), of_k = fma(load(k + d), load(k + d), of_k);
  const V scale = div(all(1.f), root(all(static_cast<float>(D))));
  of_q = div(all(1.f), root(all(sum_of(of_q) + 1e-6f))), of_k = div(all(1.f), root(all(sum_of(of_k) + 1e-6f)));
  for (int64_t d = 0; d < D; d += 8) {
    V query = load(q + d), key = load(k + d);
    if (job.erases) {
      query = mul(mul(query, of_q), scale), key = mul(key, of_k);
      store(q + d, query), store(k + d, key);
    }
    both = fma(key, query, both);
  }
  line[job.channels() + 2 * job.filled() + part] = sum_of(both);
}

// Sums with a row's k where it ERASES, and with its q where it READS, of 8 * N columns of a state. FOLDS: of what the
// state at `from` becomes by the row before, with its k, decay and change, which goes to `to`; `ahead` is wanted next.
template <int N, bool ERASES, bool FOLDS, bool READS>
static INLINE void walk(int64_t D, const float* from, float* to, const float* fold, V decay, const V* change,
                        const float* ahead, const float* k, const float* q, V* of_k, V* of_q) {
  V m[N], r[N];
  UNROLLED for (int n = 0; n < N; n++) m[n] = r[n] = all(0.f);
  for (int64_t i = 0; i < D; i++, from += 8 * N, to += 8 * N, ahead += 8 * N) {
    const V key = all(ERASES ? k[i] : 0.f), query = all(READS ? q[i] : 0.f), by = all(FOLDS ? fold[i] : 0.f);
    UNROLLED for (int n = 0; n < N; n++) {
      if (FOLDS && READS && n % 2 == 0) __builtin_prefetch(ahead + 8 * n, 0, 2);
      V state = load(from + 8 * n);
      if (FOLDS) store(to + 8 * n, state = fma(by, change[n], mul(decay, state)));
      if (ERASES) m[n] = fma(key, state, m[n]);
      if (READS) r[n] = fma(query, state, r[n]);
    }
  }
  UNROLLED for (int n = 0; n < N; n++) of_k[n] = m[n], of_q[n] = r[n];
}

template <int N, bool ERASES>
static void fold_columns(const Delta& job, int64_t h, int64_t column, float* scratch) {
  const int64_t D = job.key_width, E = job.width, H8 = job.filled(), g = h / job.sharing(), C = job.channels();
  const int64_t query = g * D, key = query + job.key_heads * D, value = 2 * job.key_heads * D + h * E + column;
  const float* past = job.past_state + (h * E + column) * D;
  float* committed = job.new_state + (h * E + column) * D;
  auto after = [&](int64_t row) {  // where the state is after it
    if (row < -job.pending) return const_cast<float*>(past);
    return row == -1 ? committed : scratch + (row < 0 ? 0 : job.tree.places[row] - 1) * D * 8 * N;
  };
  if (job.pending == 0 && committed != past) memcpy(committed, past, static_cast<size_t>(D) * 8 * N * sizeof(float));
  V change[N], m[N], r[N];
  for (int64_t i = -job.pending, last = INT64_MIN; i < job.rows; i++) {
    const int64_t row = i < 0 ? i : job.tree.order[i], parent = job.before(row);
    const float *line = line_of(job, row), *k = line + key, *q = line + query;
    float* at = after(parent);
    if (parent != last) {
      if (row < 0) walk<N, ERASES, false, false>(D, at, at, k, V{}, change, at, k, q, m, r);
      else walk<N, ERASES, false, true>(D, at, at, k, V{}, change, at, k, q, m, r);
    } else {
      const float *before = line_of(job, parent), *from = after(job.before(parent));
      const V decay = all(before[C + H8 + h]);
      if (row < 0) walk<N, ERASES, true, false>(D, from, at, before + key, decay, change, from, k, q, m, r);
      else
        walk<N, ERASES, true, true>(D, from, at, before + key, decay, change, parent < 0 ? past + D * 8 * N : from, k,
                                    q, m, r);
    }
    const V beta = all(line[C + h]), decay = all(line[C + H8 + h]), both = all(line[C + 2 * H8 + g]);
    for (int n = 0; n < N; n++) {
      const V v = load(line + value + 8 * n);
      change[n] = mul(ERASES ? sub(v, mul(decay, m[n])) : v, beta);
      if (row < 0) continue;
      const V read = fma(both, change[n], mul(decay, r[n]));
      store(job.out + (row * job.heads + h) * E + column + 8 * n, ERASES ? read : fma(all(job.skips[h]), v, read));
    }
    last = row;
  }
}

static void delta_block(const Delta& job, int64_t head, int64_t column, float* scratch) {
  const bool wide = job.columns() == 32;
  (job.erases ? wide ? fold_columns<4, true> : fold_columns<1, true>
   : wide     ? fold_columns<4, false>
              : fold_columns<1, false>)(job, head, column, scratch);
}
