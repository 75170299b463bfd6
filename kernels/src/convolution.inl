// Short convolutions, eight numbers at a time. Included once per instruction set, after attention.inl.

// What the layer keeps of row t: b * x, one half in the place of keys, the other in that of values.
static void keep(const Attention& job, const Convolution& layer, int64_t t) {
  const int64_t half = job.kv_heads * job.width;
  const float *b = layer.inputs + t * 6 * half, *x = b + 4 * half;
  float* const rows[] = {job.new_keys + t * half, job.new_values + t * half};
  for (float* row : rows) {
    for (int64_t d = 0; d < half; d += 8) store(row + d, mul(load(b + d), load(x + d)));
    if (job.numbers == HALF) as_in_cache(row, half);
    b += half, x += half;
  }
  for (int64_t h = 0; h < job.kv_heads && job.writes; h++)
    if (job.numbers == HALF) write_row<uint16_t>(job, h, t);
    else write_row<float>(job, h, t);
}

// out (+)= weights * row, of n numbers.
template <class B>
static inline void weighted(const float* weights, const B* row, int64_t n, float* out, bool more) {
  for (int64_t d = 0; d < n; d += 8) {
    const V weight = load(weights + d), number = load(row + d);
    store(out + d, more ? fma(weight, number, load(out + d)) : mul(weight, number));
  }
}
// The same of what the cache keeps of the token in a column.
template <class B>
static void weighted_column(const Attention& job, const float* weights, int64_t column, float* out) {
  const int64_t D = job.width, half = job.kv_heads * D;
  for (int64_t h = 0; h < job.kv_heads; h++) {
    const B* key = static_cast<const B*>(job.past_keys) + h * job.key_head + column * job.key_column;
    const B* value = static_cast<const B*>(job.past_values) + h * job.value_head + column * job.value_column;
    weighted(weights + h * D, key, D, out + h * D, true);
    for (int64_t d = 0; d < D; d += job.cut)
      weighted(weights + half + h * D + d, value + d / job.cut * job.value_piece, job.cut, out + half + h * D + d,
               true);
  }
}

// The output of row t: c times the sum over its last tokens, itself first, in the place of c among the inputs of a row.
static void convolve(const Attention& job, const Convolution& layer, int64_t t) {
  const int64_t half = job.kv_heads * job.width, size = 2 * half, seen = job.visible(t);
  const float* gate = layer.inputs + t * 3 * size + size;
  float* out = job.out + t * size;
  for (int64_t back = 0; back < layer.tokens; back++) {
    const float* weights = layer.weights + back * size;
    const int64_t number = seen - 1 - back;  // among the tree's rows that it sees
    if (number >= 0) {
      const int64_t row = job.chain ? number : job.seen[job.first[t] + number];
      weighted(weights, job.new_keys + row * half, half, out, back > 0);
      weighted(weights + half, job.new_values + row * half, half, out + half, back > 0);
      continue;
    }
    if (job.committed + number < 0) break;
    if (job.numbers == HALF) weighted_column<uint16_t>(job, weights, job.committed + number, out);
    else weighted_column<float>(job, weights, job.committed + number, out);
  }
  for (int64_t d = 0; d < size; d += 8) {
    const V sum = layer.bias == nullptr ? load(out + d) : add(load(out + d), load(layer.bias + d));
    store(out + d, mul(load(gate + d), sum));
  }
}
