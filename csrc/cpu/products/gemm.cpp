// Linear layers: packing, choice of kernel, and how the work is cut into pieces.
#include "gemm.h"

#include "../arguments.h"
#include "compact.h"
#include "../elements.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace qr {
namespace {

// K as stored: whole tiles for bf16.
int64_t padded_depth(int32_t dtype, int64_t k) { return dtype == QR_BFLOAT16 ? round_up(k, kDepth) : k; }

int64_t panel_bytes(int32_t dtype, int64_t k) {
  return dtype == QR_BFLOAT16_COMPACT ? compact_bytes(k) : padded_depth(dtype, k) * kPanel * bytes_of(dtype);
}

uint16_t read_16bit(const void* row, int32_t from, int32_t to, int64_t i) {
  if (from == to) return static_cast<const uint16_t*>(row)[i];
  const float value = read_float(row, from, i);
  return to == QR_BFLOAT16 ? to_bfloat16(value) : to_half(value);
}

// Where element i of a column of a bf16 panel stands: pairs of i lie side by side, as the tile instructions read them.
int64_t bf16_offset(int64_t column, int64_t i) {
  return (i / 32) * 1024 + (column / 16) * 512 + (i % 32) / 2 * 32 + (column % 16) * 2 + i % 2;
}

// Elements [begin, end) of a row of a weight into its column of a panel; begin is even.
void pack_row(char* panel, int32_t dtype, int64_t column, int64_t begin, int64_t end, const void* row,
              int32_t src_dtype) {
  auto* out16 = reinterpret_cast<uint16_t*>(panel);
  if (dtype == QR_BFLOAT16 && src_dtype == QR_BFLOAT16 && end - begin == 32) {
    uint16_t* out = out16 + bf16_offset(column, begin);
    const auto* in = static_cast<const uint16_t*>(row) + begin;
    for (int64_t pair = 0; pair < 16; ++pair) std::memcpy(out + pair * 32, in + pair * 2, 4);
  } else if (dtype == QR_BFLOAT16) {
    for (int64_t i = begin; i < end; ++i) out16[bf16_offset(column, i)] = read_16bit(row, src_dtype, dtype, i);
  } else if (dtype == QR_FLOAT16) {
    for (int64_t i = begin; i < end; ++i) out16[i * kPanel + column] = read_16bit(row, src_dtype, dtype, i);
  } else {
    auto* out = reinterpret_cast<float*>(panel);
    for (int64_t i = begin; i < end; ++i) out[i * kPanel + column] = read_float(row, src_dtype, i);
  }
}

// The reverse: a row of the weight out of its column of a panel, in the packed dtype (bf16 of a compact one).
void unpack_row(void* row, const char* panel, int32_t dtype, int64_t column, int64_t k) {
  const auto* in16 = reinterpret_cast<const uint16_t*>(panel);
  auto* out16 = static_cast<uint16_t*>(row);
  if (dtype == QR_BFLOAT16_COMPACT) {
    for (int64_t i = 0; i < k; ++i) out16[i] = compact_number(panel, k, bf16_offset(column, i));
    const auto* header = reinterpret_cast<const CompactHeader*>(panel);
    const auto* patches = reinterpret_cast<const uint32_t*>(header + 1);
    for (uint32_t i = 0; i < header->patches; ++i) {
      const int64_t at = patches[i] >> 8, own = at / 1024 * 32 + at % 512 / 32 * 2 + at % 2;
      if (bf16_offset(column, own) == at) out16[own] = uint16_t(patches[i] << 8 | (out16[own] & 0xff));
    }
  } else if (dtype == QR_BFLOAT16) {
    for (int64_t i = 0; i < k; ++i) out16[i] = in16[bf16_offset(column, i)];
  } else if (dtype == QR_FLOAT16) {
    for (int64_t i = 0; i < k; ++i) out16[i] = in16[i * kPanel + column];
  } else {
    for (int64_t i = 0; i < k; ++i)
      static_cast<float*>(row)[i] = reinterpret_cast<const float*>(panel)[i * kPanel + column];
  }
}

// ---- products ----

// A piece streams about this much weight: 10-20 us, long against handing it out and short against a time slice.
constexpr int64_t kPieceBytes = 256 * 1024;
// A piece shorter than this (2 us) costs more to hand out than to compute.
constexpr int64_t kLeastPieceBytes = 32 * 1024;
// Panels that one block of rows meets in a piece of a large product.
constexpr int64_t kPiecePanels = 16;
// Pieces for each thread, at least; and of several products with many rows, which may differ: each takes long, and the
// threads should end together.
constexpr int64_t kPieces = 4, kPiecesOfMany = 16;
// Rows of output from this size on are written past the caches: to read a line only to overwrite it costs more than the
// next op gains by finding it there. Tiles are written in order of address, for which lines come ahead by themselves.
constexpr int64_t kPastCaches = 1 << 20;
// Elements of x that one piece prepares (3-5 us) of few rows; of many it takes 32 rows, which are written side by side.
constexpr int64_t kPreparedElements = 16 * 1024;
constexpr int64_t kFewRows = 64;

// A product whose x is brought into the form that its kernel reads.
struct Preparation {
  const Gemm* gemm;
  const int32_t* order;
  const void* x;
  int64_t offset;  // of the prepared form, in bytes
};

// Find out what is to be prepared, each form once, and have every product read it from prepared + offset.
struct Preparations {
  Preparation each[kMostWeights];
  int64_t of[kMostWeights];  // of each product; -1: it reads x as it is
  int64_t count = 0, bytes = 0;

  Preparations(const Product* products, int64_t num_products, int32_t x_dtype) {
    for (int64_t i = 0; i < num_products; ++i) {
      const GemmArgs& args = products[i].args;
      const Gemm* gemm = products[i].gemm;
      const int64_t own = x_dtype == QR_BFLOAT16_TILES ? 0 : gemm->prepared_bytes(args.rows, args.k, x_dtype);
      of[i] = -1;
      if (own == 0) continue;
      int64_t same = 0;
      while (same < count && (each[same].gemm != gemm || each[same].order != args.order)) ++same;
      if ((of[i] = same) < count) continue;
      each[count++] = {gemm, args.order, args.x, bytes};
      bytes += round_up(own, 64);
    }
  }
};

// Panels that a piece of a product takes, of so many in all products together.
int64_t panels_of_piece(const GemmArgs& args, int64_t all_panels, int64_t count) {
  const int64_t halves = args.up_panels != 0 ? 2 : 1, weight = args.panel_bytes * halves;
  int64_t group = args.rows <= 32 ? kPieceBytes / weight : kPiecePanels / halves;
  const int64_t fair = all_panels / ((count > 1 && args.rows > 32 ? kPiecesOfMany : kPieces) * num_threads());
  if (group > fair) group = fair;
  const int64_t least = args.rows <= 32 ? divide_up(kLeastPieceBytes, weight) : 1;
  return group < least ? least : group;
}

void run_piece(const Product& product, int64_t index) {
  const GemmArgs& args = product.args;
  const int64_t panels = divide_up(args.n, kPanel), groups = divide_up(panels, product.group);
  const int64_t row_begin = index / groups * kBlockRows, panel_begin = index % groups * product.group;
  const int64_t row_end = row_begin + kBlockRows < args.rows ? row_begin + kBlockRows : args.rows;
  const int64_t panel_end = panel_begin + product.group < panels ? panel_begin + product.group : panels;
  product.gemm->run(args, row_begin, row_end, panel_begin, panel_end);
}

}  // namespace

int32_t prepare_and_run(Product* products, int64_t count, int32_t x_dtype) {
  const Preparations all(products, count, x_dtype);
  char* prepared = all.bytes == 0 ? nullptr : static_cast<char*>(scratch(1, all.bytes));
  if (all.bytes != 0 && prepared == nullptr) return QR_ENOMEM;
  // On this thread when small, on the pool when large.
  const int64_t rows = products->args.rows, k = products->args.k;
  const int64_t fit = kPreparedElements / k, each = rows > kFewRows || fit > 32 ? 32 : fit < 1 ? 1 : fit;
  const int64_t pieces = divide_up(rows, each);
  parallel_for(all.count * pieces, [&](int64_t index) {
    const Preparation& own = all.each[index / pieces];
    const int64_t begin = index % pieces * each, end = begin + each < rows ? begin + each : rows;
    own.gemm->prepare(prepared + own.offset, own.x, x_dtype, rows, k, begin, end, own.order);
  });
  for (int64_t i = 0; i < count; ++i)
    if (all.of[i] >= 0) products[i].args.x = prepared + all.each[all.of[i]].offset;
  run(products, count);
  return QR_OK;
}

Weight dense_weight(const void* packed, int32_t dtype, int32_t x_dtype, int64_t k) {
  const Kernels* table = kernels();
  Weight weight{};
  weight.gemm = dtype == QR_FLOAT32                  ? &table->gemm_fp32
                : dtype == QR_FLOAT16                ? &table->gemm_fp16
                : element_of(x_dtype) != QR_BFLOAT16 ? &table->gemm_bf16_float
                : dtype == QR_BFLOAT16_COMPACT       ? &table->gemm_bf16_compact
                                                     : &table->gemm_bf16;
  weight.args.packed = packed;
  weight.args.compact = dtype == QR_BFLOAT16_COMPACT;
  weight.args.panel_bytes = panel_bytes(dtype, k);
  return weight;
}

Weight weight_of(const qr_weight& w, int32_t x_dtype, int64_t k) {
  Weight weight = w.format == 0 ? dense_weight(w.packed, int32_t(w.dtype), x_dtype, k)
                                : quantized_weight(w, x_dtype, k);
  weight.args.k = k;
  weight.args.bias = w.bias;
  return weight;
}

bool is_weight_of(const qr_weight& w, int64_t n, int64_t k) {
  if (w.packed == nullptr || !is_aligned(w.packed) || !is_weight(n, k) || w.outputs != n) return false;
  if (w.format == 0) return w.dtype >= 0 && w.dtype <= INT32_MAX && is_weight_dtype(int32_t(w.dtype));
  return is_quantized_weight(w, k);
}

void run(Product* products, int64_t count) {
  const auto blocks_of = [](const GemmArgs& args) { return divide_up(args.rows, kBlockRows); };
  int64_t all_panels = 0, pieces = 0;
  for (int64_t i = 0; i < count; ++i)
    all_panels += divide_up(products[i].args.n, kPanel) * blocks_of(products[i].args);
  for (int64_t i = 0; i < count; ++i) {
    Product& product = products[i];
    product.group = panels_of_piece(product.args, all_panels, count);
    product.first = pieces;
    pieces += divide_up(divide_up(product.args.n, kPanel), product.group) * blocks_of(product.args);
  }
  // Tickets alternate between as many stretches of memory as there are threads: each mostly reads on where it was.
  const int64_t threads = num_threads(), each = divide_up(pieces, threads);
  parallel_for(each * threads, [&](int64_t ticket) {
    const int64_t index = ticket % threads * each + ticket / threads;
    if (index >= pieces) return;
    const Product* behind =
        std::upper_bound(products, products + count, index, [](int64_t i, const Product& p) { return i < p.first; });
    run_piece(behind[-1], index - behind[-1].first);
  });
}

int32_t linear(const Weight& weight, void* out, int32_t out_dtype, const void* x, int32_t x_dtype, int64_t rows,
               int64_t n, int64_t k, const float* bias, int32_t activation, const void* residual) {
  Product product{weight.gemm, weight.args, 0, 0};
  GemmArgs& args = product.args;
  args.x = x;
  args.rows = rows;
  args.n = n;
  args.k = k;
  args.bias = bias;
  args.activation = activation;
  args.residual = residual;
  args.residual_dtype = element_of(x_dtype);
  args.out = out;
  args.out_dtype = out_dtype;
  args.past_caches = out_dtype != QR_BFLOAT16_TILES && rows * n * bytes_of(out_dtype) >= kPastCaches &&
                     n % kPanel == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
  return prepare_and_run(&product, 1, x_dtype);
}

int32_t gated_linear(const Weight& weight, void* out, int32_t out_dtype, const void* x, int32_t x_dtype, int64_t rows,
                     int64_t f, int64_t k, const float* bias, int32_t activation) {
  if (f % kPanel == 0) {
    Weight gated = weight;
    gated.args.up_panels = f / kPanel;
    return linear(gated, out, out_dtype, x, x_dtype, rows, f, k, bias, activation, nullptr);
  }
  // The up half starts inside a panel.
  return gated_in_two_steps(out, out_dtype, rows, f, activation, [&](float* both) {
    return linear(weight, both, QR_FLOAT32, x, x_dtype, rows, 2 * f, k, bias, QR_NONE, nullptr);
  });
}

}  // namespace qr

using namespace qr;

extern "C" {

int64_t qr_packed_bytes(int32_t dtype, int64_t out_features, int64_t in_features) {
  if (!is_weight_dtype(dtype) || !is_weight(out_features, in_features)) return QR_EINVAL;
  return divide_up(out_features, kPanel) * panel_bytes(dtype, in_features);
}

int32_t qr_pack_linear(void* packed, int32_t dtype, int64_t out_features, int64_t in_features, const void* src,
                       int32_t src_dtype, int64_t num_rows, int64_t src_stride, int64_t row_offset) {
  if (!is_weight_dtype(dtype) || !is_dtype(src_dtype) || !is_weight(out_features, in_features) ||
      !is_part(out_features, in_features, num_rows, src_stride, row_offset) || !are_there(packed, src) ||
      !is_aligned(packed))
    return QR_EINVAL;
  const bool compact = dtype == QR_BFLOAT16_COMPACT;
  const Kernels* table = kernels();
  if (compact && table == nullptr) return QR_ESTATE;
  const int64_t row_end = row_offset + num_rows;
  if (compact && (row_offset % kPanel != 0 || (row_end % kPanel != 0 && row_end != out_features)))
    return QR_EUNSUPPORTED;
  const int64_t bytes = panel_bytes(dtype, in_features), plain_bytes = panel_bytes(QR_BFLOAT16, in_features);
  std::atomic<int32_t> status{QR_OK};
  for_each_panel(row_offset, num_rows, [&](int64_t panel, int64_t begin, int64_t end) {
    char *out = static_cast<char*>(packed) + panel * bytes, *plain = out;
    if (compact) {
      if (status.load() != QR_OK) return;
      plain = static_cast<char*>(scratch(3, plain_bytes));
      if (plain == nullptr) return status.store(QR_ENOMEM);
      if (in_features % kDepth != 0 || end - begin < kPanel) std::memset(plain, 0, size_t(plain_bytes));
    }
    constexpr int64_t kStep = 32;  // 32 x 32 elements at a time: what is read and what is written stay in L1
    for (int64_t i = 0; i < in_features; i += kStep)
      for (int64_t row = begin; row < end; ++row)
        pack_row(plain, compact ? int32_t(QR_BFLOAT16) : dtype, row - panel * kPanel, i,
                 i + kStep < in_features ? i + kStep : in_features,
                 static_cast<const char*>(src) + (row - row_offset) * src_stride * bytes_of(src_dtype), src_dtype);
    if (compact && !table->compact_panel(out, reinterpret_cast<uint16_t*>(plain), in_features, table->compact_streams))
      status.store(QR_EUNSUPPORTED);
  });
  return status.load();
}

int32_t qr_packed_rows(void* out, const void* packed, int32_t dtype, int64_t out_features, int64_t in_features,
                       const int64_t* ids, int64_t rows) {
  if (!is_weight_dtype(dtype) || !is_weight(out_features, in_features) || !are_sizes(rows, in_features))
    return QR_EINVAL;
  if (rows > 0 && !are_there(out, packed, ids)) return QR_EINVAL;
  for (int64_t row = 0; row < rows; ++row)
    if (ids[row] < 0 || ids[row] >= out_features) return QR_EINVAL;
  const int64_t bytes = panel_bytes(dtype, in_features);
  parallel_for(rows, [&](int64_t row) {
    unpack_row(static_cast<char*>(out) + row * in_features * bytes_of(dtype),
               static_cast<const char*>(packed) + ids[row] / kPanel * bytes, dtype, ids[row] % kPanel, in_features);
  });
  return QR_OK;
}

int32_t qr_reads_tiles(int32_t weight_dtype, int64_t rows, int64_t k) {
  return kernels() != nullptr && is_weight_dtype(weight_dtype) && is_weight(1, k) &&
         takes(dense_weight(nullptr, weight_dtype, QR_BFLOAT16_TILES, k), QR_BFLOAT16_TILES, rows, k);
}

int32_t qr_linear(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const void* packed,
                  int32_t weight_dtype, int64_t rows, int64_t n, int64_t k, const float* bias, int32_t activation,
                  const void* residual) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_product(out, x, packed, rows, n, k) || !is_output(out_dtype, n) || !is_weight_dtype(weight_dtype) ||
      !is_activation(activation))
    return QR_EINVAL;
  const Weight weight = dense_weight(packed, weight_dtype, x_dtype, k);
  if (!takes(weight, x_dtype, rows, k)) return QR_EINVAL;
  return linear(weight, out, out_dtype, x, x_dtype, rows, n, k, bias, activation, residual);
}

int32_t qr_gated_linear(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const void* packed,
                        int32_t weight_dtype, int64_t rows, int64_t f, int64_t k, const float* bias,
                        int32_t activation) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!are_sizes(2, f) || !is_product(out, x, packed, rows, 2 * f, k) ||
      !is_output_of(out_dtype, element_of(x_dtype), f) || !is_weight_dtype(weight_dtype) || !is_activation(activation))
    return QR_EINVAL;
  const Weight weight = dense_weight(packed, weight_dtype, x_dtype, k);
  if (!takes(weight, x_dtype, rows, k)) return QR_EINVAL;
  return gated_linear(weight, out, out_dtype, x, x_dtype, rows, f, k, bias, activation);
}

int32_t qr_read_bandwidth(const void* data, int64_t bytes, uint64_t* sum) {
  const Kernels* table = kernels();
  if (table == nullptr) return QR_ESTATE;
  if (!are_sizes(bytes) || bytes % 256 != 0 || sum == nullptr || (bytes > 0 && data == nullptr)) return QR_EINVAL;
  std::atomic<uint64_t> total{0};
  const int64_t pieces = divide_up(bytes, kPieceBytes), threads = num_threads(), each = divide_up(pieces, threads);
  parallel_for(each * threads, [&](int64_t ticket) {
    const int64_t index = ticket % threads * each + ticket / threads;
    if (index >= pieces) return;
    const int64_t begin = index * kPieceBytes;
    const int64_t size = bytes - begin < kPieceBytes ? bytes - begin : kPieceBytes;
    total.fetch_add(table->read_sum(static_cast<const char*>(data) + begin, size));
  });
  *sum = total.load();
  return QR_OK;
}
}
