// The sums of a block's products, of four inputs at a time. fold(r, sum) takes those of row r. Included before tile.inl,
// after
//
//   four_levels<BITS>(p)      levels of four inputs, those of four bits times 16, as their zero levels are
//   dots(sums, levels, four)  sums + products with a row's four inputs

template <int R, int BITS, bool>
struct Block {
  template <class Fold>
  TARGET INLINE static void add(int64_t inputs, int64_t step, Cursor& at, Fold fold) {
    Ints sums[R];
    constexpr int64_t BYTES = 4 * PANEL * BITS / 8;  // of the levels of four inputs
    UNROLLED for (int r = 0; r < R; r++) sums[r] = Ints{};
    _Pragma("GCC unroll 1") for (int64_t k = 0; k < inputs; k += 16) {
      UNROLLED for (int j = 0; j < 4; j++) {
        const Ints w = four_levels<BITS>(at.levels + j * BYTES);
        if (j * BYTES % 64 == 0) __builtin_prefetch(at.ahead + j * BYTES);
        UNROLLED for (int r = 0; r < R; r++) sums[r] = dots(sums[r], w, each(at.x + (j * R + r) * 4));
      }
      at.levels += 4 * BYTES, at.ahead += BITS / 4 * step, at.x += 16 * R;
    }
    UNROLLED for (int r = 0; r < R; r++) fold(r, sums[r]);
  }
};
