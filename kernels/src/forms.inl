// What every instruction set computes alike, and `product`, which it has of its own. Included once per set.
#include "lanes.hpp"
#include "rows.inl"
#include "attention.inl"
#include "convolution.inl"
#include "delta.inl"

#define FORMS \
  before, quantise, product, prepare, scratch, part, join, whole_rows, keep, convolve, delta_row, delta_block
