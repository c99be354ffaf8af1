#include "content_check.h"

#include <algorithm>
#include <vector>

#include "errors.h"

namespace hisparse::host {
namespace {

constexpr int64_t kMaxBitmapWords = 4096;  // two bitmaps of 16 KiB fit on every device
constexpr uint32_t kIndexThreads = 256;

// Tables of a call on the device, read once a fault is found.
class Contents {
 public:
  explicit Contents(const CheckPlace& place) : place_(place) {}

  template <typename T>
  std::vector<int64_t> row(const T* first, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    place_.runtime.read(values.data(), first, values.size() * sizeof(T), place_.device.index, place_.stream);
    return std::vector<int64_t>(values.begin(), values.end());
  }
  template <typename T>
  int64_t at(const T* place) const {
    return row(place, 1).front();
  }
  std::vector<int64_t> indices(const IndexVector& vector, int64_t count) const {
    if (vector.is_int64) return row(static_cast<const int64_t*>(vector.data), count);
    return row(static_cast<const int32_t*>(vector.data), count);
  }

 private:
  const CheckPlace& place_;
};

void refuse_capture(const CheckPlace& place) {
  if (!place.runtime.captures(place.device.index, place.stream)) return;
  throw std::runtime_error(
      "the content check reads its report on the host, which a graph cannot capture: "
      "capture without HISPARSE_CHECK, and outside of hisparse.checking()");
}

std::string place_text(int64_t row, std::optional<int64_t> column) {
  return column ? text("[", row, ", ", *column, "]") : text("[", row, "]");
}

ContentFault fault_of(const char* argument, int64_t row, std::optional<int64_t> column,
                      const std::string& expected, const std::string& got) {
  return {argument, row, column, text(argument, ": expected ", expected, ", got ", got)};
}

// What stands at a place, and the next place where it stands as well.
std::string twice_text(const std::vector<int64_t>& values, int64_t first, std::optional<int64_t> row) {
  const int64_t value = values[static_cast<size_t>(first)];
  const auto again = std::find(values.begin() + first + 1, values.end(), value) - values.begin();
  const auto place = [&](int64_t at) { return row ? place_text(*row, at) : place_text(at, std::nullopt); };
  return text(value, " at ", place(first), " and ", place(again));
}

ContentFault fault_of(Fault fault, uint64_t key, const SwapInParams& p, const Contents& contents) {
  const auto b = static_cast<int64_t>(key >> 32), column = static_cast<int64_t>(key & 0xFFFFFFFFu);
  const std::vector<int64_t> requests = contents.indices(p.req_pool_indices, p.batch);
  const int64_t rid = requests[static_cast<size_t>(b)];
  const int64_t length = contents.indices(p.seq_lens, p.batch)[static_cast<size_t>(b)];
  const auto range = [](int64_t least, int64_t end) { return text(least, " to ", end - 1); };
  const auto single = [&](int64_t value) {
    return text(value, " at ", place_text(rid, column), " (row ", b, " of the batch)");
  };
  const auto slot_fault = [&](const char* argument, const std::string& expected, int64_t value) {
    return fault_of(argument, rid, column, expected, single(value));
  };
  // A request outside of the tables has no rows there.
  const auto tokens = [&] { return p.device_buffer_tokens + rid * p.buffer_table_stride; };
  const auto lru = [&] { return p.lru_slots + rid * p.lru_stride; };
  const std::string permutation = text("a permutation of ", range(0, p.hot_buffer_size));

  switch (fault) {
    case Fault::kRequest:
      return fault_of("req_pool_indices", b, std::nullopt,
                      text(range(0, p.table_rows), ", a row of every table"),
                      text(rid, " at ", place_text(b, std::nullopt)));
    case Fault::kRepeatedRequest:
      return fault_of("req_pool_indices", b, std::nullopt, "another request in each real row",
                      twice_text(requests, b, std::nullopt));
    case Fault::kToken: {
      const int64_t at = by_blocks(p) ? p.blocks.index_of(static_cast<uint32_t>(column)) : column;
      const int64_t asked = contents.at(p.top_k_tokens + b * p.top_k_stride + at);
      const int64_t token = by_blocks(p) ? asked * p.blocks.tokens + (column - at * p.blocks.tokens) : asked;
      const bool is_in_sequence = token >= 0 && token < length;
      return fault_of(by_blocks(p) ? "top_k_blocks" : "top_k_tokens", b, at,
                      is_in_sequence
                          ? text("tokens with a column in host_cache_locs, ", range(0, p.max_tokens))
                          : text("-1, or tokens of the sequence, ", range(0, length)),
                      text(token, " at ", place_text(b, at)));
    }
    case Fault::kDeviceLoc:
      return slot_fault("device_buffer_locs",
                        text(range(0, p.device_buffer.rows), ", a row of device_buffer"),
                        contents.at(p.device_buffer_locs + rid * p.buffer_table_stride + column));
    case Fault::kSlotToken:
      return slot_fault("device_buffer_tokens", text("-1, or tokens from ", range(0, p.max_tokens)),
                        contents.at(tokens() + column));
    case Fault::kRepeatedToken:
      return fault_of("device_buffer_tokens", rid, column, "a token in one slot at most",
                      twice_text(contents.row(tokens(), p.hot_buffer_size), column, rid));
    case Fault::kLruSlot:
      return slot_fault("lru_slots", permutation, contents.at(lru() + column));
    case Fault::kRepeatedLruSlot:
      return fault_of("lru_slots", rid, column, permutation,
                      twice_text(contents.row(lru(), p.hot_buffer_size), column, rid));
    default:
      return slot_fault(
          "host_cache_locs",
          text(range(0, p.host_cache.rows), ", a row of host_cache, for a token that is asked for"),
          contents.at(p.host_cache_locs + rid * p.host_locs_stride + column));
  }
}

}  // namespace

void check_contents(const SwapInParams& params, uint32_t threads, const CheckPlace& place) {
  refuse_capture(place);
  SwapInCheckParams check{params, nullptr, 0};
  const int64_t most = static_cast<int64_t>(place.info.shared_memory_bytes / 8);
  const int64_t values = std::max({params.table_rows, params.max_tokens, int64_t{params.hot_buffer_size}});
  check.bitmap_words = static_cast<int32_t>(std::min({kMaxBitmapWords, most, values / 32 + 1}));
  LaunchShape shape;
  shape.blocks = static_cast<uint32_t>(params.batch);
  shape.threads = threads;
  shape.shared_bytes = static_cast<size_t>(check.bitmap_words) * 8;
  uint64_t first[kFaults];
  place.runtime.inspect(KernelId::kCheckSwapIn, &check, sizeof(check), check.first_faults, first, kFaults,
                        shape, place.device.index, place.stream);
  for (int fault = 0; fault < kFaults; ++fault) {
    if (first[fault] != kNoFault)
      throw fault_of(static_cast<Fault>(fault), first[fault], params, Contents(place));
  }
}

void check_indices(const int64_t* src_indices, const int64_t* dst_indices, int64_t count, int64_t src_rows,
                   int64_t dst_rows, const CheckPlace& place) {
  refuse_capture(place);
  IndexCheckParams check{{src_indices, dst_indices}, {src_rows, dst_rows}, count, nullptr};
  LaunchShape shape;
  const int64_t blocks = (count - 1) / kIndexThreads + 1;
  shape.blocks = static_cast<uint32_t>(std::min<int64_t>(blocks, 4 * place.info.multiprocessors));
  shape.threads = kIndexThreads;
  uint64_t first[kFaults];
  place.runtime.inspect(KernelId::kCheckIndices, &check, sizeof(check), check.first_faults, first, kFaults,
                        shape, place.device.index, place.stream);
  for (int side = 0; side < 2; ++side) {
    const auto at = first[static_cast<int>(side == 0 ? Fault::kSourceIndex : Fault::kDestinationIndex)];
    if (at == kNoFault) continue;
    const auto position = static_cast<int64_t>(at);
    const int64_t value = Contents(place).at(check.indices[side] + position);
    throw fault_of(
        side == 0 ? "src_indices" : "dst_indices", position, std::nullopt,
        text("less than ", check.rows[side], ", the items of ", side == 0 ? "the source" : "the destination"),
        text(value, " at ", place_text(position, std::nullopt)));
  }
}

}  // namespace hisparse::host
