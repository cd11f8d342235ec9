// The part of cuSPARSE that cuda/cusparse.cpp calls, on the CPU. It insists on what the library's
// documentation asks for: a product that was prepared is computed with the same context, algorithm
// and workspace, whose contents are left alone.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cusparse.h>

#include <cstdint>
#include <cstring>
#include <vector>

struct cusparseContext {
  cudaStream_t stream;
};

struct cusparseSpMatDescr {
  int64_t rows, cols, entries;
  const int32_t *rowptr, *col;
  const void* values;
  cudaDataType type;
  // Of the last preparation.
  cusparseHandle_t handle;
  cusparseSpMMAlg_t algorithm;
  const void* workspace;
};

struct cusparseDnMatDescr {
  int64_t rows, width;
  void* values;
  cudaDataType type;
};

namespace {

constexpr char kMark[] = "what was found out about the matrix";

struct Counts {
  int64_t matrices, prepared, products, unsupported_algorithm;
  cusparseStatus_t failure;  // of the next product
} counts;

template <typename T, typename A>
void multiply(const cusparseSpMatDescr& matrix, const cusparseDnMatDescr& x,
              const cusparseDnMatDescr& out) {
  std::vector<A> sum(x.width);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    sum.assign(x.width, A{0});
    for (int32_t e = matrix.rowptr[row]; e < matrix.rowptr[row + 1]; ++e) {
      const auto value = static_cast<A>(static_cast<const T*>(matrix.values)[e]);
      const T* from = static_cast<const T*>(x.values) + int64_t{matrix.col[e]} * x.width;
      for (int64_t f = 0; f < x.width; ++f) sum[f] += value * static_cast<A>(from[f]);
    }
    T* to = static_cast<T*>(out.values) + row * x.width;
    for (int64_t f = 0; f < x.width; ++f) to[f] = static_cast<T>(sum[f]);
  }
}

bool fits(cusparseHandle_t handle, cusparseOperation_t op_matrix, cusparseOperation_t op_x,
          cusparseConstSpMatDescr_t matrix, cusparseConstDnMatDescr_t x, cusparseDnMatDescr_t out,
          cudaDataType compute) {
  const cudaDataType type = matrix->type;
  return handle != nullptr && handle->stream == reinterpret_cast<cudaStream_t>(7) &&
         op_matrix == CUSPARSE_OPERATION_NON_TRANSPOSE &&
         op_x == CUSPARSE_OPERATION_NON_TRANSPOSE && x->type == type && out->type == type &&
         compute == (type == CUDA_R_64F ? CUDA_R_64F : CUDA_R_32F) && x->rows == matrix->cols &&
         out->rows == matrix->rows && out->width == x->width;
}

template <typename A>
bool is(const void* scalar, A expected) {
  return *static_cast<const A*>(scalar) == expected;
}

}  // namespace

extern "C" {

Counts* stand_in_counts() { return &counts; }

cusparseStatus_t cusparseGetProperty(libraryPropertyType type, int* value) {
  *value = type == MAJOR_VERSION ? CUSPARSE_VER_MAJOR : type == MINOR_VERSION ? 3 : 4;
  return CUSPARSE_STATUS_SUCCESS;
}

const char* cusparseGetErrorString(cusparseStatus_t) { return "an error of the stand-in"; }

cusparseStatus_t cusparseCreate(cusparseHandle_t* handle) {
  *handle = new cusparseContext{nullptr};
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseSetStream(cusparseHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseCreateCsr(cusparseSpMatDescr_t* matrix, int64_t rows, int64_t cols,
                                   int64_t entries, void* rowptr, void* col, void* values,
                                   cusparseIndexType_t rowptr_type, cusparseIndexType_t col_type,
                                   cusparseIndexBase_t base, cudaDataType type) {
  if (rowptr_type != CUSPARSE_INDEX_32I || col_type != CUSPARSE_INDEX_32I ||
      base != CUSPARSE_INDEX_BASE_ZERO) {
    return CUSPARSE_STATUS_INVALID_VALUE;
  }
  *matrix = new cusparseSpMatDescr{
      rows,   cols, entries, static_cast<const int32_t*>(rowptr), static_cast<const int32_t*>(col),
      values, type, nullptr, CUSPARSE_SPMM_ALG_DEFAULT,           nullptr};
  ++counts.matrices;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseSpMatSetValues(cusparseSpMatDescr_t matrix, void* values) {
  matrix->values = values;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseDestroySpMat(cusparseConstSpMatDescr_t matrix) {
  delete matrix;
  --counts.matrices;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseCreateDnMat(cusparseDnMatDescr_t* matrix, int64_t rows, int64_t cols,
                                     int64_t leading, void* values, cudaDataType type,
                                     cusparseOrder_t order) {
  if (leading != cols || order != CUSPARSE_ORDER_ROW) return CUSPARSE_STATUS_INVALID_VALUE;
  *matrix = new cusparseDnMatDescr{rows, cols, values, type};
  ++counts.matrices;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseDnMatSetValues(cusparseDnMatDescr_t matrix, void* values) {
  matrix->values = values;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseDestroyDnMat(cusparseConstDnMatDescr_t matrix) {
  delete matrix;
  --counts.matrices;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseSpMM_bufferSize(cusparseHandle_t handle, cusparseOperation_t op_matrix,
                                         cusparseOperation_t op_x, const void*,
                                         cusparseConstSpMatDescr_t matrix,
                                         cusparseConstDnMatDescr_t x, const void*,
                                         cusparseDnMatDescr_t out, cudaDataType compute,
                                         cusparseSpMMAlg_t algorithm, size_t* bytes) {
  if (algorithm == counts.unsupported_algorithm) return CUSPARSE_STATUS_NOT_SUPPORTED;
  if (!fits(handle, op_matrix, op_x, matrix, x, out, compute)) return CUSPARSE_STATUS_INVALID_VALUE;
  *bytes = algorithm == CUSPARSE_SPMM_CSR_ALG1 ? 0 : sizeof(kMark);
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseSpMM_preprocess(cusparseHandle_t handle, cusparseOperation_t op_matrix,
                                         cusparseOperation_t op_x, const void*,
                                         cusparseConstSpMatDescr_t matrix,
                                         cusparseConstDnMatDescr_t x, const void*,
                                         cusparseDnMatDescr_t out, cudaDataType compute,
                                         cusparseSpMMAlg_t algorithm, void* workspace) {
  if (!fits(handle, op_matrix, op_x, matrix, x, out, compute)) return CUSPARSE_STATUS_INVALID_VALUE;
  auto* prepared = const_cast<cusparseSpMatDescr_t>(matrix);
  prepared->handle = handle;
  prepared->algorithm = algorithm;
  prepared->workspace = workspace;
  if (algorithm != CUSPARSE_SPMM_CSR_ALG1) std::memcpy(workspace, kMark, sizeof(kMark));
  ++counts.prepared;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseSpMM(cusparseHandle_t handle, cusparseOperation_t op_matrix,
                              cusparseOperation_t op_x, const void* alpha,
                              cusparseConstSpMatDescr_t matrix, cusparseConstDnMatDescr_t x,
                              const void* beta, cusparseDnMatDescr_t out, cudaDataType compute,
                              cusparseSpMMAlg_t algorithm, void* workspace) {
  if (counts.failure != CUSPARSE_STATUS_SUCCESS) return counts.failure;
  const bool is_double = compute == CUDA_R_64F;
  if (!fits(handle, op_matrix, op_x, matrix, x, out, compute) ||
      !(is_double ? is(alpha, 1.0) && is(beta, 0.0) : is(alpha, 1.0f) && is(beta, 0.0f)) ||
      matrix->handle != handle || matrix->algorithm != algorithm ||
      matrix->workspace != workspace ||
      (algorithm != CUSPARSE_SPMM_CSR_ALG1 && std::memcmp(workspace, kMark, sizeof(kMark)) != 0)) {
    return CUSPARSE_STATUS_INVALID_VALUE;
  }
  switch (matrix->type) {
    case CUDA_R_32F: multiply<float, float>(*matrix, *x, *out); break;
    case CUDA_R_64F: multiply<double, double>(*matrix, *x, *out); break;
    case CUDA_R_16BF: multiply<__nv_bfloat16, float>(*matrix, *x, *out); break;
    case CUDA_R_16F: multiply<__half, float>(*matrix, *x, *out); break;
    default: return CUSPARSE_STATUS_NOT_SUPPORTED;
  }
  ++counts.products;
  return CUSPARSE_STATUS_SUCCESS;
}
}
