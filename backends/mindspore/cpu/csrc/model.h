// A model's packed weights and scratch memory, found by a number that a graph can carry.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "packing.h"

namespace mindstream {

// Which tensor `Model::put` gets; the numbers are the C interface.
enum class Tensor : int32_t {
  kEmbedding = 0, kHead, kFinalNorm, kInputNorm, kPostNorm, kQuery, kKey, kValue, kOut, kGate, kUp,
  kDown, kQueryBias, kKeyBias, kValueBias, kQueryNorm, kKeyNorm,
};

class Model {
 public:
  // Throws std::invalid_argument with a sentence if the kernels cannot take these shapes.
  explicit Model(const Dims &dims);

  // Packs one tensor of the checkpoint; layer counts from 0. Throws std::invalid_argument.
  void put(int64_t layer, Tensor what, const Source &source);
  // Throws std::invalid_argument naming a tensor that was not put.
  void finish();

  const Dims &dims() const { return dims_; }
  // One step: fills in what the model owns of `args`, whose other members the caller has checked.
  // logits [count, vocab] are those of the rows `rows` of `ids` [tokens]. With `best` instead of logits
  // it gets the id of each row's largest logit, the lowest of equals, exact in float32: -1 for a row
  // with a NaN, or with nothing above -inf.
  void forward(StackArgs &args, const int32_t *ids, const int32_t *rows, int64_t count, float *logits, float *best);

 private:
  int64_t phases() const { return dims_.layers * kLayerPhases + 1; }
  // Those after which all keys and values are written.
  int64_t cached_phases() const { return (dims_.layers - 1) * kLayerPhases + kCachePhases; }
  int64_t qkv_width() const { return (dims_.heads + 2 * dims_.kv_heads) * dims_.head_dim; }

  struct LayerData {
    PackedMatrix qkv, out, gate_up, down;
    Memory input_norm, post_norm, q_norm, k_norm, qkv_bias;
    uint32_t present = 0;  // bits of Tensor
  };

  void place_weights();
  void put_global(Tensor what, const Source &source);
  void put_vector(Memory &to, const Source &source, int64_t size, int64_t first, int64_t total);
  void embed(const int32_t *ids, int64_t count, float *out) const;
  // Afterwards args.hidden holds the result in the `count` rows of `rows`; the others may be unfinished.
  void run(StackArgs &args, const int32_t *rows, int64_t count);
  void head(const float *hidden, const int32_t *rows, int64_t count, float *logits, float *best);
  void plan_attention(StackArgs &args);
  void reserve(StackArgs &args);
  void finish_rows(const StackArgs &all, const int32_t *rows, int64_t count);
  void reserve_rows(Rows &rows, Memory *memory, int64_t count, int64_t depth) const;

  Dims dims_;
  std::vector<std::unique_ptr<LayerData>> data_;
  std::vector<Layer> layers_;
  PackedMatrix head_;
  Memory weights_, embedding_, final_norm_;
  bool has_head_ = false;
  std::vector<AttentionItem> items_;
  Memory hidden_, qkv_, partials_, narrow_[4], wide_[4], head_rows_[4], chosen_hidden_, chosen_qkv_, best_;
  std::vector<int32_t> ones_, chosen_lens_, chosen_tables_;
};

// 0 is no model. These lock; a model lives until it is removed.
int64_t add_model(std::unique_ptr<Model> model);
Model *find_model(int64_t handle);
void remove_model(int64_t handle);

}  // namespace mindstream
