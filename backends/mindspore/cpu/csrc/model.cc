#include "model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "ragged.h"
#include "threads.h"

namespace mindstream {
namespace {

void require(bool holds, const std::string &what, int64_t given) {
  if (!holds) throw std::invalid_argument(what + ", given " + std::to_string(given));
}

constexpr int64_t kFewRows = 16;  // fewer are not worth a second job

uint32_t bit(Tensor what) { return 1u << static_cast<int>(what); }

const char *const kNames[] = {"embedding", "head", "final norm", "input norm", "post norm", "query", "key", "value",
                              "output", "gate", "up", "down"};

}  // namespace

Model::Model(const Dims &dims) : dims_(dims) {
  require(dims.layers > 0 && dims.layers < 4096, "layers must be 1 to 4095", dims.layers);
  require(dims.hidden > 0 && dims.hidden % 32 == 0 && dims.hidden <= 32768, "hidden size must be a multiple of 32 up to 32768", dims.hidden);
  require(dims.intermediate > 0 && dims.intermediate % 32 == 0 && dims.intermediate <= 32768, "intermediate size must be a multiple of 32 up to 32768", dims.intermediate);
  require(dims.head_dim > 0 && dims.head_dim % 32 == 0 && dims.head_dim <= 256, "head size must be a multiple of 32 up to 256", dims.head_dim);
  require(dims.kv_heads > 0 && dims.heads > 0 && dims.heads % dims.kv_heads == 0, "heads must be a multiple of the KV heads", dims.heads);
  require(dims.heads * dims.head_dim <= 32768, "all heads together must be at most 32768 wide", dims.heads * dims.head_dim);
  require(dims.block_size > 0 && dims.block_size % 16 == 0, "block size must be a multiple of 16", dims.block_size);
  require(dims.vocab > 0 && dims.vocab <= 1 << 24, "vocabulary must have 1 to 16777216 tokens", dims.vocab);
  const int64_t attended = dims.heads * dims.head_dim, kv = dims.kv_heads * dims.head_dim;
  for (int64_t i = 0; i < dims.layers; i++) {
    auto layer = std::make_unique<LayerData>();
    layer->qkv.shape(attended + 2 * kv, dims.hidden, dims.weights);
    layer->out.shape(dims.hidden, attended, dims.weights);
    layer->gate_up.shape(2 * dims.intermediate, dims.hidden, dims.weights);
    layer->down.shape(dims.hidden, dims.intermediate, dims.weights);
    data_.push_back(std::move(layer));
  }
  head_.shape(dims.vocab, dims.hidden, dims.weights);
  place_weights();
}

// One piece of memory for all, in the order in which a step reads them: small matrices of their own
// would lie on small pages, and what is asked for behind the end of one is the begin of the next.
void Model::place_weights() {
  std::vector<PackedMatrix *> all;
  for (const auto &layer : data_)
    for (PackedMatrix *matrix : {&layer->qkv, &layer->out, &layer->gate_up, &layer->down}) all.push_back(matrix);
  all.push_back(&head_);
  size_t total = 0;
  for (const PackedMatrix *matrix : all) total += matrix->bytes() + kRedZone;
  weights_.reserve(total);
  char *at = weights_.as<char>();
  for (PackedMatrix *matrix : all) {
    matrix->place(at);
    at += matrix->bytes() + kRedZone;
    forbid(at - kRedZone, kRedZone);
  }
}

void Model::put_vector(Memory &to, const Source &source, int64_t size, int64_t first, int64_t total) {
  require(source.rows * source.columns == size, "a vector of " + std::to_string(size) + " values is wanted", source.rows * source.columns);
  to.reserve(static_cast<size_t>(total) * sizeof(float));
  const Source row = {source.data, source.type, 1, size};
  row.read(0, to.as<float>() + first);
}

void Model::put_global(Tensor what, const Source &source) {
  const int64_t hidden = dims_.hidden;
  if (what == Tensor::kFinalNorm) return put_vector(final_norm_, source, hidden, 0, hidden);
  require(source.columns == hidden, "rows of " + std::to_string(hidden) + " values are wanted", source.columns);
  require(source.rows == dims_.vocab, "a row for each of " + std::to_string(dims_.vocab) + " tokens is wanted", source.rows);
  if (what == Tensor::kHead) {
    head_.pack(source, Place::kBehind, 0);
    has_head_ = true;
    return;
  }
  embedding_.reserve(static_cast<size_t>(dims_.vocab * hidden) * sizeof(float) / (dims_.weights == Weights::kF32 ? 1 : 2));
  std::vector<float> row(static_cast<size_t>(hidden));
  for (int64_t i = 0; i < dims_.vocab; i++) {
    source.read(i, row.data());
    if (dims_.weights == Weights::kF32)
      std::memcpy(embedding_.as<float>() + i * hidden, row.data(), row.size() * sizeof(float));
    else
      for (int64_t k = 0; k < hidden; k++) embedding_.as<uint16_t>()[i * hidden + k] = round_bf16(row[static_cast<size_t>(k)]);
  }
}

void Model::put(int64_t index, Tensor what, const Source &source) {
  if (what <= Tensor::kFinalNorm) return put_global(what, source);
  require(index >= 0 && index < dims_.layers, "layer must be below " + std::to_string(dims_.layers), index);
  LayerData &layer = *data_[static_cast<size_t>(index)];
  const int64_t attended = dims_.heads * dims_.head_dim, kv = dims_.kv_heads * dims_.head_dim, all = attended + 2 * kv;
  const auto matrix = [&](PackedMatrix &to, Place place, int64_t first, int64_t rows) {
    require(source.rows == rows, "a weight of " + std::to_string(rows) + " rows is wanted", source.rows);
    require(source.columns == to.matrix.depth, "a weight of " + std::to_string(to.matrix.depth) + " columns is wanted", source.columns);
    to.pack(source, place, first);
  };
  switch (what) {
    case Tensor::kInputNorm: put_vector(layer.input_norm, source, dims_.hidden, 0, dims_.hidden); break;
    case Tensor::kPostNorm: put_vector(layer.post_norm, source, dims_.hidden, 0, dims_.hidden); break;
    case Tensor::kQuery: matrix(layer.qkv, Place::kBehind, 0, attended); break;
    case Tensor::kKey: matrix(layer.qkv, Place::kBehind, attended, kv); break;
    case Tensor::kValue: matrix(layer.qkv, Place::kBehind, attended + kv, kv); break;
    case Tensor::kOut: matrix(layer.out, Place::kBehind, 0, dims_.hidden); break;
    case Tensor::kGate: matrix(layer.gate_up, Place::kGate, 0, dims_.intermediate); break;
    case Tensor::kUp: matrix(layer.gate_up, Place::kUp, 0, dims_.intermediate); break;
    case Tensor::kDown: matrix(layer.down, Place::kBehind, 0, dims_.hidden); break;
    case Tensor::kQueryBias: put_vector(layer.qkv_bias, source, attended, 0, all); break;
    case Tensor::kKeyBias: put_vector(layer.qkv_bias, source, kv, attended, all); break;
    case Tensor::kValueBias: put_vector(layer.qkv_bias, source, kv, attended + kv, all); break;
    case Tensor::kQueryNorm: put_vector(layer.q_norm, source, dims_.head_dim, 0, dims_.head_dim); break;
    case Tensor::kKeyNorm: put_vector(layer.k_norm, source, dims_.head_dim, 0, dims_.head_dim); break;
    default: require(false, "unknown tensor", static_cast<int64_t>(what));
  }
  layer.present |= bit(what);
}

void Model::finish() {
  if (!final_norm_) throw std::invalid_argument("the checkpoint has no final norm");
  if (!has_head_) throw std::invalid_argument("the checkpoint has neither a head nor tied embeddings");
  if (!embedding_ && dims_.weights == Weights::kInt8) throw std::invalid_argument("the checkpoint has no embedding");
  layers_.clear();
  for (size_t i = 0; i < data_.size(); i++) {
    LayerData &d = *data_[i];
    for (int what = static_cast<int>(Tensor::kInputNorm); what <= static_cast<int>(Tensor::kDown); what++)
      if (!(d.present >> what & 1)) throw std::invalid_argument("layer " + std::to_string(i) + " has no " + kNames[what] + " weight");
    Layer layer;
    layer.input_norm = d.input_norm.as<float>();
    layer.post_norm = d.post_norm.as<float>();
    layer.q_norm = d.q_norm.as<float>();
    layer.k_norm = d.k_norm.as<float>();
    layer.qkv_bias = d.qkv_bias.as<float>();
    layer.qkv = d.qkv.matrix;
    layer.out = d.out.matrix;
    layer.gate_up = d.gate_up.matrix;
    layer.down = d.down.matrix;
    layers_.push_back(layer);
  }
}

void Model::embed(const int32_t *ids, int64_t count, float *out) const {
  const int64_t hidden = dims_.hidden;
  const SourceType type = dims_.weights == Weights::kF32 ? SourceType::kF32 : SourceType::kBf16;
  const Source table = {embedding_.as<void>(), type, dims_.vocab, hidden};
  for (int64_t i = 0; i < count; i++)
    if (embedding_)
      table.read(ids[i], out + i * hidden);
    else
      head_.read(ids[i], out + i * hidden);
}

void Model::reserve_rows(Rows &rows, Memory *memory, int64_t count, int64_t depth) const {
  const size_t n = static_cast<size_t>(count);
  const size_t groups = static_cast<size_t>((depth + kGroup - 1) / kGroup);
  rows.stride = static_cast<int64_t>(kernels().row_bytes(dims_.weights, depth));
  memory[0].reserve(n * static_cast<size_t>(rows.stride));
  rows.units = memory[0].as<char>();
  if (dims_.weights != Weights::kInt8) return;
  memory[1].reserve(n * static_cast<size_t>(depth) * sizeof(float));
  memory[2].reserve(n * groups * sizeof(float));
  memory[3].reserve(n * groups * sizeof(int32_t));
  rows.staging = memory[1].as<float>();
  rows.scales = memory[2].as<float>();
  rows.offsets = memory[3].as<int32_t>();
}

// With less work than threads a long context is split among them.
void Model::plan_attention(StackArgs &args) {
  const RaggedShape shape = {args.q_lens, args.kv_lens, args.sequences, dims_.heads, dims_.kv_heads};
  int64_t longest = 0;
  for (int64_t b = 0; b < args.sequences; b++) longest = std::max<int64_t>(longest, args.kv_lens[b]);
  attention_items(shape, kernels().tile, 0, args.threads, items_);
  const bool few = static_cast<int64_t>(items_.size()) < 4 * thread_count();
  args.chunks = few && longest > kChunkKeys ? (longest + kChunkKeys - 1) / kChunkKeys : 0;
  if (args.chunks) attention_items(shape, kernels().tile, kChunkKeys, args.threads, items_);
  args.items = items_.data();
  args.item_count = static_cast<int64_t>(items_.size());
}

void Model::reserve(StackArgs &args) {
  const int64_t attended = dims_.heads * dims_.head_dim;
  partials_.reserve(static_cast<size_t>(args.tokens * dims_.heads * args.chunks * (dims_.head_dim + 2)) * sizeof(float));
  reserve_rows(args.narrow, narrow_, args.tokens, std::max(dims_.hidden, attended));
  reserve_rows(args.wide, wide_, args.tokens, dims_.intermediate);
  args.partials = partials_.as<float>();
}

void Model::forward(StackArgs &args, const int32_t *ids, const int32_t *rows, int64_t count, float *logits, float *best) {
  hidden_.reserve(static_cast<size_t>(args.tokens * dims_.hidden) * sizeof(float));
  args.hidden = hidden_.as<float>();
  embed(ids, args.tokens, args.hidden);
  run(args, rows, count);
  head(args.hidden, rows, count, logits, best);
}

void Model::run(StackArgs &args, const int32_t *rows, int64_t count) {
  args.dims = &dims_;
  args.threads = thread_count();
  args.layers = layers_.data();
  args.final_norm = final_norm_.as<float>();
  qkv_.reserve(static_cast<size_t>(args.tokens * qkv_width()) * sizeof(float));
  args.qkv = qkv_.as<float>();
  plan_attention(args);
  reserve(args);
  // Nobody reads the other rows after the last layer has written their keys and values.
  const bool choose = args.tokens - count >= kFewRows;
  run_parallel({&args, choose ? cached_phases() : phases(), kernels().stack.items, kernels().stack.run});
  if (choose) finish_rows(args, rows, count);
}

// The rest of the last layer and the final norm for some rows, each as a sequence of its own.
void Model::finish_rows(const StackArgs &all, const int32_t *rows, int64_t count) {
  const int64_t hidden = dims_.hidden, width = qkv_width(), tables = all.table_width;
  StackArgs args = all;
  args.first_phase = cached_phases();
  args.tokens = args.sequences = count;
  chosen_hidden_.reserve(static_cast<size_t>(count * hidden) * sizeof(float));
  chosen_qkv_.reserve(static_cast<size_t>(count * width) * sizeof(float));
  ones_.assign(static_cast<size_t>(count), 1);
  chosen_lens_.clear();
  chosen_tables_.clear();
  for (int64_t i = 0; i < count; i++) {
    int64_t b = 0, first = 0;  // of the row's sequence; rows behind all sequences are padding
    while (b < all.sequences && rows[i] >= first + all.q_lens[b]) first += all.q_lens[b++];
    const bool used = b < all.sequences;
    chosen_lens_.push_back(used ? static_cast<int32_t>(all.kv_lens[b] - all.q_lens[b] + rows[i] - first + 1) : 0);
    const int32_t *table = all.block_tables + (used ? b : 0) * tables;
    chosen_tables_.insert(chosen_tables_.end(), table, table + tables);
    std::memcpy(chosen_hidden_.as<float>() + i * hidden, all.hidden + rows[i] * hidden, static_cast<size_t>(hidden) * sizeof(float));
    std::memcpy(chosen_qkv_.as<float>() + i * width, all.qkv + rows[i] * width, static_cast<size_t>(width) * sizeof(float));
  }
  args.hidden = chosen_hidden_.as<float>();
  args.qkv = chosen_qkv_.as<float>();
  args.q_lens = ones_.data();
  args.kv_lens = chosen_lens_.data();
  args.block_tables = chosen_tables_.data();
  plan_attention(args);
  reserve(args);
  run_parallel({&args, phases() - args.first_phase, kernels().stack.items, kernels().stack.run});
  for (int64_t i = 0; i < count; i++)
    std::memcpy(all.hidden + rows[i] * hidden, args.hidden + i * hidden, static_cast<size_t>(hidden) * sizeof(float));
}

void Model::head(const float *hidden, const int32_t *rows, int64_t count, float *logits, float *best) {
  HeadArgs args = {&head_.matrix, hidden, rows, count, thread_count(), logits, best, {}, nullptr};
  reserve_rows(args.acts, head_rows_, count, dims_.hidden);
  const int64_t items = logits ? 0 : kernels().matmul_items(head_.matrix, count, args.threads);
  best_.reserve(static_cast<size_t>(items * count) * sizeof(Best));
  args.best = best_.as<Best>();
  run_parallel({&args, kHeadPhases, kernels().head.items, kernels().head.run});
}

namespace {

std::mutex registry_lock;
std::map<int64_t, std::unique_ptr<Model>> registry;
int64_t last_handle = 0;

}  // namespace

int64_t add_model(std::unique_ptr<Model> model) {
  std::lock_guard<std::mutex> lock(registry_lock);
  registry[++last_handle] = std::move(model);
  return last_handle;
}

Model *find_model(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry_lock);
  const auto found = registry.find(handle);
  return found == registry.end() ? nullptr : found->second.get();
}

void remove_model(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry_lock);
  registry.erase(handle);
}

}  // namespace mindstream
