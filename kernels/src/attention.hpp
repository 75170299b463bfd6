// What attention, convolutions and delta nets share: rows of texts, and the caches with the rows before them.
#pragma once
#include "kernels.hpp"
#include "steps.hpp"

namespace eagle {

struct Heads {
  int64_t heads = 0, kv_heads = 0, width = 0, window = 0;
  float scale = 1, cap = 0;
  const Kernels* kernels = nullptr;
};

// Of a text that shares a pass: where the first layer's keys and values lie, bytes from one such layer to the next,
// columns that they are laid out for, and how many are valid. Of a delta net past rows and states, W as columns, and
// where the first layer's new state goes; text 0 has outputs for them.
struct Text {
  int64_t keys, key_layer, values, value_layer, columns, committed, next;
};

// Text i of those that were announced, in the layer in which text 0 has these keys and values.
ort::Status find_text(const void* keys, const void* values, int64_t columns, int64_t i, Text* own);

// Reads which of a tree's rows each of the new ones sees, once for all layers. most_earlier: rows that may stand before
// the new ones in the mask. several: whether the rows are of several texts, which were announced.
ort::Status look(const ort::Tensor& positions, const ort::Tensor& tree, int64_t rows, int64_t most_earlier, Pass* pass,
                 bool* several);

// Reads the cache of a layer, the positions of the new rows and what they see, of the inputs from `first` on, and provides
// the outputs: [1, T, heads * D], new keys and new values. several: see `look`.
ort::Status read_cache(const Heads& node, Pass* pass, int first, int64_t rows, Attention* job, bool* several);

// The rows of text i among those of a pass (`all`), with its own cache.
ort::Status text_job(const Heads& node, const Attention& all, const Visible& seen, int64_t i, bool several,
                     Attention* job);

// A copy of weights [size, 1, tokens] of a short convolution, of the last token first: [tokens, size].
ort::Status turn(const Source& source, const ort::Tensor& weights, const float** out);

}  // namespace eagle
