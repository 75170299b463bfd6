// Products of a tile. Included once per instruction set, after what it has for sixteen columns:
//
//   TILE_ROWS                   rows that registers have room for
//   PUTS_APART                  whether Block<R, 4, true> is for levels that are put apart
//   Ints, Floats                a number of each column
//   each(p)                     the same four bytes for every column
//   Block<R, BITS>::add         the sums of a block, see dots.inl
//   zero_levels<BITS>(p)
//   times(zeros, sum)           products of numbers that fit 16 bits
//   plus(sums, more)
//   steps_of(p)
//   folded(sums, steps, scale, f)  fma(float(sums), steps * scale, f)
//   write(p, v)

template <int R, int BITS, bool APART>
TARGET __attribute__((noinline)) void tile(const Tile& t) {
  Cursor at = {t.levels, t.ahead, t.x};
  Floats f[R];
  UNROLLED for (int r = 0; r < R; r++) f[r] = Floats{};
  const uint8_t* meta = t.meta;
  for (int64_t b = 0; b < t.blocks; b++, meta += META) {
    const Floats steps = steps_of(reinterpret_cast<const uint16_t*>(meta));
    auto fold = [&](int r, Ints sum) {
      const float scale = t.scales[r * t.blocks + b];
      sum = plus(sum, times(zero_levels<BITS>(meta + 32), each(t.sums + r * t.blocks + b)));
      f[r] = folded(sum, steps, BITS == 4 ? scale * 0.0625f : scale, f[r]);
    };
    Block<R, BITS, APART>::add(t.block, t.step, at, fold);
  }
  UNROLLED for (int r = 0; r < R; r++) write(t.y + r * t.stride, f[r]);
}

template <int BITS, bool APART = false, int R = 1>
void tile_of(const Tile& t, int rows) {
  if (rows == R) return tile<R, BITS, APART>(t);
  if constexpr (R < TILE_ROWS) tile_of<BITS, APART, R + 1>(t, rows);
}

void product(const Tile& t, int bits, int rows) {
  if (bits == 8) tile_of<8>(t, rows);
  else if (PUTS_APART && t.apart) tile_of<4, PUTS_APART>(t, rows);
  else tile_of<4>(t, rows);
}
