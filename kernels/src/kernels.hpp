// What an instruction set provides. Every set computes the same bits: integer sums are exact in any order, and all sums
// of floats have an order that is fixed here and in attention.inl.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define UNROLLED _Pragma("GCC unroll 12")
#define INLINE inline __attribute__((always_inline))

namespace eagle {

// ---------------------------------------------------------------------------------------------------------- products
//
//   y[n] = fold over blocks b, ascending, from 0:  y = fma(float(d), step[n, b] * scale[b], y)
//   d    = sum over the block of (level[n, k] - zero[n, b]) * q[k], exact; of four bits 16 d, and scale / 16
//   q[k] = nearest(x[k] * (127 / a)), scale[b] = a / 127, with a the block's largest absolute value
//
// The last block may have fewer inputs; levels beyond them meet q = 0.

constexpr int64_t PANEL = 16;  // columns that are stored together
constexpr int64_t META = 48;   // bytes per panel and block: 16 steps in fp16, 16 zero levels (of four bits: 16 times)

constexpr int MOST_ROWS = 12;  // of a tile, of any set

// Levels of a panel's block: those of four inputs of column 0, of column 1, ..., then of the next four inputs. Of four
// bits columns 0 to 7 have the lower half of a byte, and 8 to 15 the upper one.
struct Weight {
  int64_t inputs, columns, block, blocks, panels;  // K, N, channels per block, blocks per column, panels of columns
  int bits;                                        // 4 or 8
  uint8_t* levels;                                 // [panels, blocks, block * 16 * bits / 8]
  uint8_t* meta;                                   // [panels, blocks, META]
  int64_t panel_bytes() const { return blocks * block * PANEL * bits / 8; }
};

// What a row of inputs goes through first: nothing, an activation that gates a second row, or a norm over its mean square.
// BOUNDED: (up + 1) * x * sigmoid(alpha * x), with x at most `limit` and up on either side.
enum Activation : int { NONE = 0, SILU = 1, GELU = 2, BOUNDED = 3, SIGMOID = 4 };
struct Before {
  int activation = NONE;
  float alpha = 1, limit = 0;
  const float* norm = nullptr;  // factors [K]; null: no norm
  float epsilon = 0;
  bool any() const { return activation != NONE || norm != nullptr; }
};

// A panel of a weight and some rows, quantised, that are multiplied by it.
struct Tile {
  const uint8_t *levels, *meta;  // of the panel
  bool apart;                    // whether levels of four bits have a byte each, in the places of those of eight
  int64_t block, blocks;         // inputs of a block, blocks
  const int8_t* x;               // four inputs of row 0, of row 1, ..., then the next four
  const float* scales;           // [rows, blocks]
  const int32_t* sums;           // [rows, blocks], minus those of x over a block
  float* y;                      // [rows, stride], 16 columns of each
  int64_t stride;
  const uint8_t* ahead;  // memory that is wanted next, and how far a tile moves on in it for 128 bytes of its levels
  int64_t step;
};
struct Cursor {  // what a tile reads next
  const uint8_t *levels, *ahead;
  const int8_t* x;
};

// --------------------------------------------------------------------------------------------------------- attention
//
// A row's visible columns are numbered by position: the committed ones, then its ancestors among the new rows. Sums run
// over blocks of BLOCK such numbers, then over GROUPs of them. So a result depends on the row and its visible columns.

constexpr int64_t BLOCK = 128, GROUP = 256;

// What keys and values are kept as. A row of bytes is D signed bytes and a scale in fp32; see `to_bytes`.
enum Numbers : int { SINGLE, HALF, BYTES };
constexpr int64_t MOST_WIDTH = 1024, SCALE = 4;  // of a head; bytes

struct Attention {
  int64_t rows, committed, columns;     // T, valid columns of the cache, columns that it is laid out for
  int64_t heads, kv_heads, width, cut;  // D; values of a head are stored in pieces of `cut`
  int64_t window;                       // positions that a row sees, itself included; 0: all
  float scale, cap;                     // cap 0: scores have no bound
  Numbers numbers;                      // that the cache holds
  int64_t row;                          // floats that a new key or value takes: D, or D / 4 + 1 of bytes
  bool writes;                          // new keys and values go to the columns after the committed ones too
  const float *q, *k, *v;               // [T, heads, D], [T, kv_heads, D] twice
  const float *cosine, *sine;           // [T, turned / 2], or null
  const float* sinks;                   // [heads], scores without a key, or null
  int64_t turned;                       // numbers of a head that are rotated: the first ones; 0: they are already
  const void *past_keys, *past_values;  // column 0 of head 0
  int64_t key_head, key_column;         // numbers from one head to the next, and from one column to the next
  int64_t value_head, value_column, value_piece;
  const int64_t* positions;            // [T]
  int64_t earlier;                     // rows of the tree that the cache holds after the committed ones
  float *out, *new_keys, *new_values;  // [T, heads, D], [earlier + T, kv_heads, row] twice
  bool chain;                          // row t sees the tree's rows 0..t; else those in `seen`
  const int32_t *seen, *first;         // row t sees seen[first[t]] .. seen[first[t + 1] - 1], ascending
  int64_t longest;                     // the most of the tree's rows that one sees
  float* queries;                      // [kv_heads, T, heads / kv_heads, D], rotated and scaled
  float* parts;                        // [kv_heads, groups, T * heads / kv_heads, D + 2]; split work only
  int64_t groups;

  INLINE int64_t sharing() const { return heads / kv_heads; }
  INLINE int64_t visible(int64_t t) const { return chain ? t + 1 : first[t + 1] - first[t]; }
};

// A short convolution over the last tokens of a row of `Attention`, whose heads hold H numbers of a token: the first half
// as keys, the second as values.
struct Convolution {
  const float* inputs;   // [T, 3 H], of each row b, c and x
  const float* weights;  // [tokens, H], of a row itself, of the token before it, ...
  const float* bias;     // [H], or null
  int64_t tokens;        // that a row sees, itself included
};

constexpr int64_t MOST_TOKENS = 64;  // that a short convolution sees

// An order of a tree's rows in which each one's first child follows it.
struct Preorder {
  const int32_t *order, *parents;  // [rows]: rows in this order; of each row its parent, -1 for none
  const int32_t* places;           // [rows]: of the state after a row, among those that are kept at once, from 1 on
  int64_t kept;
};

// A gated delta net, or a state space, whose H heads each have a state [D, E] that every row of a text changes. Rows are
// numbered from -past to -1 those of the past, from 0 on the new ones.
struct Delta {
  bool erases;                                 // a gated delta net: what a row's k reads of the state
  int64_t key_heads, heads, key_width, width;  // G, H, D, E
  int64_t tokens;                              // that the convolution of a row sees, itself included
  const float* weights;                        // [tokens, C], of a row itself, of the token before it, ...
  const float *rates, *biases;                 // [H, filled up to a multiple of 8]: e^A_log, dt_bias
  const float *offsets, *skips;                // of a state space [C], [H]: a bias of its convolution, D
  int64_t rows, past, pending;                 // T; W; the last rows of the past, which the state lacks
  const float *qkv, *b, *a;                    // [T, C], [T, H] twice; both are dt of a state space
  const float *past_rows, *past_state;         // [W, `kept`], [H, D, E]
  float *out, *new_rows, *new_state;           // [T, H * E], [T, `kept`], [H, D, E]
  float* ready;                                // [pending + T, `line`]: see delta.inl
  Preorder tree;                               // of the new rows
  const struct Kernels* kernels;

  INLINE int64_t sharing() const { return heads / key_heads; }
  INLINE int64_t channels() const { return 2 * key_heads * key_width + heads * width; }
  INLINE int64_t kept() const { return channels() + (erases ? 2 : 1) * heads; }
  INLINE int64_t filled() const { return (heads + 7) / 8 * 8; }
  INLINE int64_t line() const { return channels() + 2 * filled() + key_heads; }
  INLINE int64_t columns() const { return width % 32 ? 8 : 32; }  // of a state, that lie together
  INLINE int64_t before(int64_t row) const { return row < 0 ? row - 1 : tree.parents[row]; }
};

struct Kernels {
  const char* name;
  bool signed_levels;  // 8-bit levels are stored minus 128
  bool puts_apart;     // whether levels of four bits are put apart for many rows
  int tile_rows;       // of a tile, at most
  // activation(x) * up, or x / root(mean(x^2) + epsilon) * norm, of n values, a multiple of 8.
  void (*before)(const Before& step, const float* x, const float* up, int64_t n, float* out);
  // Quantises a row of `inputs` values to q [blocks * block]. sums: minus those of a block's q.
  void (*quantise)(const float* x, int64_t inputs, int64_t block, int64_t blocks, int8_t* q, float* scales,
                   int32_t* sums);
  void (*product)(const Tile& tile, int bits, int rows);
  void (*prepare)(const Attention& job, int64_t kv_head);
  size_t (*scratch)(const Attention& job, int64_t rows);  // floats that `group` and `block` need for so many rows
  void (*part)(const Attention& job, int64_t kv_head, int64_t group, float* scratch);
  void (*join)(const Attention& job, int64_t kv_head);
  void (*whole)(const Attention& job, int64_t kv_head, int64_t first, int64_t last, float* scratch);
  void (*keep)(const Attention& job, const Convolution& layer, int64_t row);
  void (*convolve)(const Attention& job, const Convolution& layer, int64_t row);
  // Makes ready what a row has for a key head and the heads that share it; of `part` = key_heads, for the gates.
  void (*delta_row)(const Delta& job, int64_t row, int64_t part);
  void (*delta_block)(const Delta& job, int64_t head, int64_t column, float* scratch);  // `columns` of a state
};

const Kernels& chosen();       // the best set of this processor, or the one that was asked for
int choose(const char* name);  // see eagle_use_instruction_set

extern const Kernels plain_kernels, avx2_kernels, vnni_kernels, avx512_kernels, neon_kernels;

}  // namespace eagle
