// How the attention of a ragged batch is cut into items of work.
#pragma once
#include <algorithm>
#include <vector>

#include "isa.h"

namespace mindstream {

struct RaggedShape {
  const int32_t *q_lens, *kv_lens;
  int64_t sequences, heads, kv_heads;
};

// At most `tile` query rows (tokens times heads of one KV head) an item. chunk_keys 0: all keys in
// one item; else an item for every so many keys. In the order of the rows, so that a thread begins with
// rows of its own, but in each thread's share the longest first.
inline void attention_items(const RaggedShape &s, int64_t tile, int64_t chunk_keys, int64_t threads,
                            std::vector<AttentionItem> &items) {
  items.clear();
  const int64_t per_kv = s.heads / s.kv_heads, heads = std::min(per_kv, tile), rows = tile / heads;
  int64_t first_token = 0;
  for (int64_t b = 0; b < s.sequences; first_token += s.q_lens[b++])
    for (int64_t row = 0; row < s.q_lens[b]; row += rows)
      for (int64_t head = 0; head < s.heads; head += std::min(heads, per_kv - head % per_kv)) {
        AttentionItem item = {};
        item.sequence = b;
        item.first_token = first_token + row;
        item.rows = std::min<int64_t>(rows, s.q_lens[b] - row);
        item.first_head = head;
        item.heads = std::min(heads, per_kv - head % per_kv);
        item.seen = s.kv_lens[b] - s.q_lens[b] + row + 1;
        item.chunk = -1;
        if (!chunk_keys) items.push_back(item);
        const int64_t keys = item.seen + item.rows - 1;
        for (int64_t chunk = 0; chunk_keys && chunk * chunk_keys < keys; chunk++) {
          item.chunk = chunk;
          items.push_back(item);
        }
      }
  const int64_t count = static_cast<int64_t>(items.size());
  for (int64_t rank = 0; rank < threads; rank++)
    std::stable_sort(items.begin() + count * rank / threads, items.begin() + count * (rank + 1) / threads,
                     [](const AttentionItem &x, const AttentionItem &y) { return x.seen > y.seen; });
}

}  // namespace mindstream
