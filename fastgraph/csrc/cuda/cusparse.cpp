// Products of sparse and dense matrices by cuSPARSE. A product that is computed again and again has
// a plan: its descriptors, and a workspace that holds what cuSPARSE has found out about the matrix.
#include <cusparse.h>
#include <dlfcn.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "bindings/checks.h"

namespace fastgraph {
namespace {

#ifdef FASTGRAPH_CUSPARSE
const std::string kLibrary = FASTGRAPH_CUSPARSE;
#else
const std::string kLibrary = "libcusparse.so." + std::to_string(CUSPARSE_VER_MAJOR);
#endif

// The functions of the library that torch has loaded. A second one would need a second context on
// each GPU, of some hundred megabytes.
struct CuSparse {
  void* library;
#define FASTGRAPH_FROM_CUSPARSE(name) \
  decltype(&::name) name =            \
      reinterpret_cast<decltype(&::name)>(library ? dlsym(library, #name) : nullptr)
  FASTGRAPH_FROM_CUSPARSE(cusparseGetProperty);
  FASTGRAPH_FROM_CUSPARSE(cusparseGetErrorString);
  FASTGRAPH_FROM_CUSPARSE(cusparseCreate);
  FASTGRAPH_FROM_CUSPARSE(cusparseSetStream);
  FASTGRAPH_FROM_CUSPARSE(cusparseCreateCsr);
  FASTGRAPH_FROM_CUSPARSE(cusparseSpMatSetValues);
  FASTGRAPH_FROM_CUSPARSE(cusparseDestroySpMat);
  FASTGRAPH_FROM_CUSPARSE(cusparseCreateDnMat);
  FASTGRAPH_FROM_CUSPARSE(cusparseDnMatSetValues);
  FASTGRAPH_FROM_CUSPARSE(cusparseDestroyDnMat);
  FASTGRAPH_FROM_CUSPARSE(cusparseSpMM_bufferSize);
  FASTGRAPH_FROM_CUSPARSE(cusparseSpMM_preprocess);
  FASTGRAPH_FROM_CUSPARSE(cusparseSpMM);
#undef FASTGRAPH_FROM_CUSPARSE

  static const CuSparse& get() {
    static const CuSparse found{dlopen(kLibrary.c_str(), RTLD_LAZY | RTLD_NOLOAD)};
    return found;
  }
};

void check(cusparseStatus_t status, const char* what) {
  if (status == CUSPARSE_STATUS_SUCCESS) return;
  const std::string text =
      what + std::string(": ") + CuSparse::get().cusparseGetErrorString(status);
  // Memory that cuSPARSE asks for itself, which torch's allocator may have taken.
  if (status == CUSPARSE_STATUS_ALLOC_FAILED || status == CUSPARSE_STATUS_INSUFFICIENT_RESOURCES) {
    TVM_FFI_THROW(FastgraphOutOfMemory) << text;
  }
  TVM_FFI_THROW(RuntimeError) << text;
}

// The context of a GPU, which is never destroyed: at the end of the process the driver goes first.
// Its stream is that of the last product that was put on one.
struct Context {
  std::mutex mutex;
  cusparseHandle_t handle = nullptr;

  static Context& of(int device) {
    static std::mutex mutex;
    static auto& contexts = *new std::map<int, Context>;
    const std::lock_guard<std::mutex> lock(mutex);
    Context& context = contexts[device];
    if (context.handle == nullptr) {
      check(CuSparse::get().cusparseCreate(&context.handle), "cusparseCreate");
    }
    return context;
  }
};

struct Destroy {
  void operator()(cusparseSpMatDescr* matrix) const {
    CuSparse::get().cusparseDestroySpMat(matrix);
  }
  void operator()(cusparseDnMatDescr* matrix) const {
    CuSparse::get().cusparseDestroyDnMat(matrix);
  }
};

template <typename T>
constexpr cudaDataType kCudaDataType = std::is_same_v<T, double>     ? CUDA_R_64F
                                       : std::is_same_v<T, bfloat16> ? CUDA_R_16BF
                                       : std::is_same_v<T, float16>  ? CUDA_R_16F
                                                                     : CUDA_R_32F;

// A contiguous tensor that cuSPARSE may read in vectors. It takes all pointers as those to memory
// that is written.
template <typename T>
T* aligned(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  T* data = checked<T>(tensor, shape, name);
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    TVM_FFI_THROW(ValueError) << name << " must be aligned to 16 bytes";
  }
  return data;
}

// out = matrix * x for one matrix, width and type of values, on one stream.
template <typename T>
class Product {
 public:
  Product(const Call& call, Tensor rowptr, Tensor col, Tensor values, Tensor x, Tensor out,
          cusparseSpMMAlg_t algorithm)
      : algorithm_(algorithm), context_(Context::of(call.device().device_id)) {
    check_ndim(rowptr, 1, "rowptr");
    check_ndim(col, 1, "col");
    check_ndim(x, 2, "x");
    num_rows_ = checked_size(rowptr.size(0) - 1, "the number of rows");
    num_cols_ = checked_size(x.size(0), "the number of columns");
    num_entries_ = checked_size(col.size(0), "the number of edges");
    width_ = checked_size(x.size(1), "the number of channels");
    const CuSparse& sparse = CuSparse::get();
    cusparseSpMatDescr_t matrix = nullptr;
    check(sparse.cusparseCreateCsr(&matrix, num_rows_, num_cols_, num_entries_,
                                   checked<int32_t>(rowptr, {num_rows_ + 1}, "rowptr"),
                                   checked<int32_t>(col, {num_entries_}, "col"),
                                   aligned<T>(values, {num_entries_}, "values"), CUSPARSE_INDEX_32I,
                                   CUSPARSE_INDEX_32I, CUSPARSE_INDEX_BASE_ZERO, kCudaDataType<T>),
          "cusparseCreateCsr");
    matrix_.reset(matrix);
    x_ = dense(aligned<T>(x, {num_cols_, width_}, "x"), num_cols_);
    out_ = dense(aligned<T>(out, {num_rows_, width_}, "out"), num_rows_);
  }

  // Finds out what may help later products, unless the algorithm is not one for such a product.
  bool prepare(const Call& call) {
    const CuSparse& sparse = CuSparse::get();
    size_t bytes = 0;
    if (!supported(call, sparse.cusparseSpMM_bufferSize, &bytes)) return false;
    constexpr DLDataType kByte{kDLUInt, 8, 1};
    // No allocator has anything for no bytes.
    workspace_ = tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc,
                                                {static_cast<int64_t>(std::max<size_t>(bytes, 1))},
                                                kByte, call.device());
    return supported(call, sparse.cusparseSpMM_preprocess, workspace_.data_ptr());
  }

  void run(const Call& call, Tensor values, Tensor x, Tensor out) {
    const CuSparse& sparse = CuSparse::get();
    auto* to_values = aligned<T>(values, {num_entries_}, "values");
    auto* to_x = aligned<T>(x, {num_cols_, width_}, "x");
    auto* to_out = aligned<T>(out, {num_rows_, width_}, "out");
    const std::lock_guard<std::mutex> lock(context_.mutex);
    check(sparse.cusparseSpMatSetValues(matrix_.get(), to_values), "cusparseSpMatSetValues");
    check(sparse.cusparseDnMatSetValues(x_.get(), to_x), "cusparseDnMatSetValues");
    check(sparse.cusparseDnMatSetValues(out_.get(), to_out), "cusparseDnMatSetValues");
    check(put(call, sparse.cusparseSpMM, workspace_.data_ptr()), "cusparseSpMM");
  }

 private:
  using A = Accumulator<T>;
  using Dense = std::unique_ptr<cusparseDnMatDescr, Destroy>;

  Dense dense(T* data, int64_t rows) const {
    cusparseDnMatDescr_t matrix = nullptr;
    check(CuSparse::get().cusparseCreateDnMat(&matrix, rows, width_, width_, data, kCudaDataType<T>,
                                              CUSPARSE_ORDER_ROW),
          "cusparseCreateDnMat");
    return Dense(matrix);
  }

  // The three steps of a product take the same arguments but for the last one.
  template <typename Step, typename Last>
  cusparseStatus_t put(const Call& call, Step step, Last last) const {
    check(CuSparse::get().cusparseSetStream(context_.handle, call.stream()), "cusparseSetStream");
    constexpr auto kNot = CUSPARSE_OPERATION_NON_TRANSPOSE;
    const A one = 1, zero = 0;
    return step(context_.handle, kNot, kNot, &one, matrix_.get(), x_.get(), &zero, out_.get(),
                kCudaDataType<A>, algorithm_, last);
  }

  template <typename Step, typename Last>
  bool supported(const Call& call, Step step, Last last) const {
    const std::lock_guard<std::mutex> lock(context_.mutex);
    const cusparseStatus_t status = put(call, step, last);
    if (status == CUSPARSE_STATUS_NOT_SUPPORTED) return false;
    check(status, "cusparseSpMM");
    return true;
  }

  int64_t num_rows_, num_cols_, num_entries_, width_;
  cusparseSpMMAlg_t algorithm_;
  Context& context_;
  std::unique_ptr<cusparseSpMatDescr, Destroy> matrix_;
  Dense x_, out_;
  tvm::ffi::Tensor workspace_;
};

cusparseSpMMAlg_t checked_algorithm(int64_t algorithm) {
  switch (algorithm) {
    case 1: return CUSPARSE_SPMM_CSR_ALG1;
    case 2: return CUSPARSE_SPMM_CSR_ALG2;
    case 3: return CUSPARSE_SPMM_CSR_ALG3;
    default: TVM_FFI_THROW(ValueError) << "algorithm must be 1, 2 or 3, got " << algorithm;
  }
}

// The version of the library that torch has loaded, 1000 * major + 100 * minor + patch; 0 if none.
int64_t cusparse_version() {
  const CuSparse& sparse = CuSparse::get();
  if (sparse.library == nullptr) return 0;
  int major = 0, minor = 0, patch = 0;
  check(sparse.cusparseGetProperty(MAJOR_VERSION, &major), "cusparseGetProperty");
  check(sparse.cusparseGetProperty(MINOR_VERSION, &minor), "cusparseGetProperty");
  check(sparse.cusparseGetProperty(PATCH_LEVEL, &patch), "cusparseGetProperty");
  return 1000 * major + 100 * minor + patch;
}

// Plans out = matrix * x for a matrix [rows, cols] with int32 rowptr [rows + 1] and col [edges],
// columns ascending and distinct in each row, values [edges], x [cols, width], out [rows, width].
// Returns a function of (values, x, out), or nothing if this cuSPARSE cannot do it by this
// algorithm (1, 2 or 3 of those for CSR). The function is for tensors of the same shapes and types
// on the same stream, for as long as rowptr and col live unchanged.
tvm::ffi::Optional<tvm::ffi::Function> plan_product(Tensor rowptr, Tensor col, Tensor values,
                                                    Tensor x, Tensor out, int64_t algorithm) {
  using Planned = tvm::ffi::Optional<tvm::ffi::Function>;
  const Call call(x);
  if (CuSparse::get().library == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "torch has not loaded cuSPARSE " << CUSPARSE_VER_MAJOR;
  }
  const cusparseSpMMAlg_t chosen = checked_algorithm(algorithm);
  return dispatch_features(x, "x", [&](auto type) -> Planned {
    using T = decltype(type);
    const auto product = std::make_shared<Product<T>>(call, rowptr, col, values, x, out, chosen);
    if (!product->prepare(call)) return Planned();
    return tvm::ffi::Function::FromTyped(
        [product](Tensor values, Tensor x, Tensor out) { product->run(Call(x), values, x, out); });
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cusparse_version, fastgraph::cusparse_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_product, fastgraph::plan_product);
