// The arguments of hisparse.kvcacheio, checked as its contract says.
#pragma once

#include <Python.h>

#include <cstddef>

#include "kvcacheio_launcher.h"

namespace hisparse::host {

enum class PoolLayout { kLayerFirst, kLayerTable, kPageFirst, kPageHead };

// The transfers by a kernel differ in the layouts of their pools. A table of layers on the source side makes
// it one of all layers; a pool with pages there holds all layers, of which one is read.
struct TransferOp {
  const char* name;
  PoolLayout src, dst;
  bool is_latent;  // one pool a side, in place of keys and values

  constexpr bool all_layers() const { return src == PoolLayout::kLayerTable; }
  constexpr bool has_pages(PoolLayout layout) const {
    return layout == PoolLayout::kPageFirst || layout == PoolLayout::kPageHead;
  }
  constexpr bool keeps_heads() const { return src == PoolLayout::kPageHead || dst == PoolLayout::kPageHead; }

  // Pools, two index vectors, [layer_id,] item_size, [layout_dim,] [num_layers,] [page_size, head_num,] and
  // the launch.
  constexpr size_t arguments() const {
    return (is_latent ? 2 : 4) + 2 + has_pages(src) + 1 + (has_pages(src) || has_pages(dst)) + all_layers() +
           (keeps_heads() ? 2 : 0) + 2;
  }
};

inline constexpr TransferOp kTransferOps[] = {
    {"transfer_kv_per_layer", PoolLayout::kLayerFirst, PoolLayout::kLayerFirst, false},
    {"transfer_kv_per_layer_pf_lf", PoolLayout::kPageFirst, PoolLayout::kLayerFirst, false},
    {"transfer_kv_per_layer_ph_lf", PoolLayout::kPageHead, PoolLayout::kLayerFirst, false},
    {"transfer_kv_all_layer", PoolLayout::kLayerTable, PoolLayout::kLayerTable, false},
    {"transfer_kv_all_layer_lf_pf", PoolLayout::kLayerTable, PoolLayout::kPageFirst, false},
    {"transfer_kv_all_layer_lf_ph", PoolLayout::kLayerTable, PoolLayout::kPageHead, false},
    {"transfer_kv_per_layer_mla", PoolLayout::kLayerFirst, PoolLayout::kLayerFirst, true},
    {"transfer_kv_per_layer_mla_pf_lf", PoolLayout::kPageFirst, PoolLayout::kLayerFirst, true},
    {"transfer_kv_all_layer_mla", PoolLayout::kLayerTable, PoolLayout::kLayerTable, true},
    {"transfer_kv_all_layer_mla_lf_pf", PoolLayout::kLayerTable, PoolLayout::kPageFirst, true},
};

// Raise ValueError, TypeError or IndexError naming the argument; `arguments` are all of the op's, in order.
TransferCall check_transfer(const TransferOp& op, PyObject* const* arguments);
template <size_t index>
TransferCall check_transfer_op(PyObject* const* arguments) {
  return check_transfer(kTransferOps[index], arguments);
}

inline constexpr int kDirectArguments = 5;
inline constexpr int kDirectFromPagesArguments = 6;
inline constexpr int kDirectToPagesArguments = 5;
inline constexpr int kEmbeddingRangesArguments = 5;
inline constexpr int kLayerCopyArguments = 4;
DirectCall check_direct(PyObject* const* arguments);
DirectCall check_direct_from_pages(PyObject* const* arguments);
DirectCall check_direct_to_pages(PyObject* const* arguments);
DirectCall check_embedding_ranges(PyObject* const* arguments);
LayerCopyCall check_layer_copy(PyObject* const* arguments);

uintptr_t get_device_accessible_ptr(PyObject* tensor, PyObject* device_index);

}  // namespace hisparse::host
