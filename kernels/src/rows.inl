// What happens to a row before it is quantised. Included once per instruction set, after lanes.hpp.

static inline V sigmoid(V x) {
  const V t = exponential(sub(all(0.f), absolute(x)));
  return div(at_sign(x, all(1.f), t), add(all(1.f), t));
}
static inline V gelu(V x) {  // 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  const V inner = mul(all(0.7978845608f), fma(mul(mul(x, x), x), all(0.044715f), x));
  const V t = exponential(mul(absolute(inner), all(-2.f)));
  const V tanh = with_sign(div(sub(all(1.f), t), add(all(1.f), t)), inner);
  return mul(mul(all(0.5f), x), add(all(1.f), tanh));
}

// See Kernels::before. n is a multiple of 8.
static void before(const Before& step, const float* x, const float* up, int64_t n, float* out) {
  if (step.activation == BOUNDED) {
    for (int64_t i = 0; i < n; i += 8) {
      const V v = at_most(load(x + i), step.limit);
      const V other = larger(all(-step.limit), at_most(load(up + i), step.limit));
      store(out + i, mul(add(other, all(1.f)), mul(v, sigmoid(mul(v, all(step.alpha))))));
    }
    return;
  }
  if (step.activation != NONE) {
    for (int64_t i = 0; i < n; i += 8) {
      const V v = load(x + i);
      const V active = step.activation == GELU ? gelu(v) : step.activation == SILU ? mul(v, sigmoid(v)) : sigmoid(v);
      store(out + i, mul(active, load(up + i)));
    }
    if (step.norm == nullptr) return;
    x = out;
  }
  V squares = all(0.f);
  for (int64_t i = 0; i < n; i += 8) squares = fma(load(x + i), load(x + i), squares);
  const float mean = sum_of(squares) / static_cast<float>(n);
  const V factor = div(all(1.f), root(all(mean + step.epsilon)));
  for (int64_t i = 0; i < n; i += 8) store(out + i, mul(mul(load(x + i), factor), load(step.norm + i)));
}
