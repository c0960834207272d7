// A device for PyTorch's CPU build that calls itself CUDA. Its memory is the host's and its kernels are those of the CPU, so that what runs on it
// computes true numbers, and everything around the kernels is as on a GPU: tensors of two devices do not mix, memory is counted, and what
// would make the host wait for the device can be an error. Loaded before torch is imported; see pretended_device.py.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace {

constexpr int DEVICES = 4;
constexpr auto KIND = c10::DeviceType::CUDA;

thread_local int device_now = 0; // as in CUDA, each thread has one
std::atomic<bool> waiting_is_an_error{false};
thread_local bool inside_an_operator = false; // where copies and numbers are not the caller's

// ---- memory ---------------------------------------------------------------------------------------------------------------------------------

struct Block {
  size_t bytes;
  int device; // -1: pinned memory of the host
};

std::mutex blocks_lock;
std::unordered_map<const void*, Block> blocks;
std::array<int64_t, DEVICES> allocated{}, peak{};

void* take(size_t bytes, int device) {
  if (bytes == 0) return nullptr;
  void* memory = c10::alloc_cpu(bytes);
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks[memory] = {bytes, device};
  if (device >= 0) {
    allocated[device] += bytes;
    peak[device] = std::max(peak[device], allocated[device]);
  }
  return memory;
}

void give_back(void* memory) {
  if (memory == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(blocks_lock);
    const Block block = blocks.at(memory);
    if (block.device >= 0) allocated[block.device] -= block.bytes;
    blocks.erase(memory);
  }
  c10::free_cpu(memory);
}

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  const auto found = blocks.find(memory);
  return found != blocks.end() && found->second.device < 0;
}

struct Memory final : c10::Allocator {
  const bool is_device;
  explicit Memory(bool device) : is_device(device) {}
  c10::DataPtr allocate(size_t bytes) override {
    const int device = is_device ? device_now : -1;
    void* memory = take(bytes, device);
    const auto place = is_device ? c10::Device(KIND, static_cast<c10::DeviceIndex>(device)) : c10::Device(c10::DeviceType::CPU);
    return {memory, memory, &give_back, place};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory device_memory(true), pinned_memory(false);
REGISTER_ALLOCATOR(KIND, &device_memory)

// ---- devices, streams, events: all work is done when it is asked for ----------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static c10::Device now() { return c10::Device(KIND, static_cast<c10::DeviceIndex>(device_now)); }
  static c10::Stream only(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : now()); }
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = now();
    if (device.has_index()) device_now = device.index();
    return before;
  }
  c10::Device getDevice() const override { return now(); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::Stream getStream(c10::Device device) const noexcept override { return only(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return only(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return only(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return only(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  using Clock = std::chrono::steady_clock;
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto passed = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override; // unlike events and devices, torch reports it
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- kernels --------------------------------------------------------------------------------------------------------------------------------

void wait_for_device(const std::string& what) {
  TORCH_CHECK(!waiting_is_an_error || inside_an_operator, what, ": called a synchronizing CUDA operation");
}

void Guard::synchronizeStream(const c10::Stream&) const { wait_for_device("a stream that is waited for"); }

struct OnDevice {
  int before;
  explicit OnDevice(std::optional<c10::Device> device) : before(device_now) {
    if (device && device->has_index()) device_now = device->index();
  }
  ~OnDevice() { device_now = before; }
};

at::Tensor make_empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>, std::optional<c10::Device> device,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const OnDevice there(device);
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type), format);
}

at::Tensor make_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const OnDevice there(device);
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(type));
}

at::Tensor seen_by_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  void* memory = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options); // the view keeps the memory
}

// Between host and device the host waits, unless the copy is not blocking and the host's memory is pinned.
at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.numel() == 0) return to;
  const auto& of_host = to.is_cuda() ? from : to;
  if (!of_host.is_cuda() && !(non_blocking && is_pinned(of_host.storage().data()))) wait_for_device("a copy between host and device");
  seen_by_host(to).copy_(seen_by_host(from));
  return to;
}

at::Tensor copy_resized(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return at::Tensor(to).copy_(from);
}

c10::Scalar as_scalar(const at::Tensor& tensor) {
  wait_for_device("a tensor read as a number");
  return seen_by_host(tensor).item();
}

at::Tensor product_in(const at::Tensor& left, const at::Tensor& right, c10::ScalarType type) {
  return at::mm(left.to(type), right.to(type));
}

// With a sum of a wider format than the factors, in place.
at::Tensor& add_product_in(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right, at::ScalarType type, const at::Scalar& beta,
                           const at::Scalar& alpha, at::Tensor& out) {
  return at::addmm_out(out, sum, left.to(type), right.to(type), beta, alpha);
}

void record_stream(at::Tensor&, c10::Stream) {}

// Attention made of plain matrix products.
int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

// The host reads a number of the result, or its size.
const std::array<const char*, 11> WAITING = {
    "aten::nonzero",  "aten::masked_select", "aten::_unique",     "aten::_unique2",     "aten::unique_dim",        "aten::unique_consecutive",
    "aten::bincount", "aten::isin",          "aten::multinomial", "aten::_linalg_eigh", "aten::_linalg_svd"};

// Indices of the host are copied to the device. An index that is a mask has as many entries as only the device knows.
bool has_waiting_index(const c10::IValue& value) {
  if (!value.isList()) return false;
  for (const auto& each : value.toListRef()) {
    if (!each.isTensor() || !each.toTensor().defined()) continue;
    const auto& index = each.toTensor();
    if (index.dtype() == at::kBool || index.dtype() == at::kByte || !index.is_cuda()) return true;
  }
  return false;
}

bool is_of_host(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && !value.toTensor().is_cuda();
}

// Whether the host has to know what the device computed, or a number of the host has to be copied to the device.
bool host_waits(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto& name = op.operator_name().name;
  for (const auto& result : schema.returns()) {
    if (result.type()->kind() == c10::TypeKind::BoolType || result.type()->kind() == c10::TypeKind::NumberType) return true;
  }
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  if (name == "aten::index") return has_waiting_index(arguments[1]);
  if (name == "aten::index_put_" || name == "aten::_index_put_impl_") return has_waiting_index(arguments[1]) || is_of_host(arguments[2]);
  if (name == "aten::where") return arguments.size() == 3 && (is_of_host(arguments[1]) || is_of_host(arguments[2]));
  if (name == "aten::repeat_interleave") return arguments.back().isNone(); // its size, if it is given
  if (name == "aten::histc") return arguments[2].toScalar().equal(0) && arguments[3].toScalar().equal(0); // no range
  return std::find(WAITING.begin(), WAITING.end(), name) != WAITING.end();
}

// Operators that take tensors of the host beside those of the device: indices, a state of random numbers, the seed of attention.
bool takes_both(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
      name.find("scaled_dot_product") != std::string::npos;
}

// As on a GPU, tensors of two devices do not mix, but for single numbers of the host.
void refuse_two_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (takes_both(op.operator_name().name)) return;
  std::optional<c10::Device> found;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (!tensor.is_cuda() && tensor.dim() == 0)) return;
    TORCH_CHECK(
        !found || *found == tensor.device(), op.operator_name().name, ": Expected all tensors to be on the same device, but found at least two devices, ",
        *found, " and ", tensor.device());
    found = tensor.device();
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const auto& each : value.toListRef()) {
        if (each.isTensor()) see(each.toTensor());
      }
    }
  }
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_two_devices(op, *stack);
  if (host_waits(op, *stack)) wait_for_device(op.operator_name().name);
  const bool before = std::exchange(inside_an_operator, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    inside_an_operator = before;
    throw;
  }
  inside_an_operator = before;
}

// ---- collectives: gloo's, on the same memory -------------------------------------------------------------------------------------------------

// Replaces the tensors of the device by the host's views of them, and back. `originals`: by the address of their values.
struct Exchanged {
  std::unordered_map<const void*, at::Tensor> originals;
  c10::IValue to_host(const c10::IValue& value) {
    return replaced(value, [this](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.is_cuda() || tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous for NCCL");
      if (tensor.is_cuda()) originals.emplace(tensor.const_data_ptr(), tensor);
      return seen_by_host(tensor);
    });
  }
  c10::IValue back(const c10::IValue& value) {
    return replaced(value, [this](const at::Tensor& tensor) {
      const auto found = originals.find(tensor.const_data_ptr());
      return found == originals.end() ? tensor : found->second;
    });
  }
  template <typename Function>
  static c10::IValue replaced(const c10::IValue& value, const Function& by) {
    if (value.isTensor()) return by(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(by(tensor));
      return all;
    }
    if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
      c10::List<std::vector<at::Tensor>> all;
      for (const auto& inner : value.toListRef()) all.push_back(replaced(inner, by).toTensorVector());
      return all;
    }
    return value;
  }
};

// gloo's work, whose results are the tensors of the device.
struct OfDevice final : c10d::Work {
  OfDevice(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> results) : work_(std::move(work)), results_(std::move(results)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { work_->wait(); }
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    work_->wait();
    std::vector<c10::Device> devices;
    for (const auto& tensor : results_) {
      if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) devices.push_back(tensor.device());
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(c10::IValue(results_));
    return future;
  }
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> results_;
};

// gloo has no means and no factors: it adds, and the sums are scaled.
std::optional<double> scale_of(const c10d::ReduceOp& op, int ranks) {
  if (op == c10d::ReduceOp::AVG) return 1.0 / ranks;
  if (op != c10d::ReduceOp::PREMUL_SUM) return std::nullopt;
  const auto* factor = reinterpret_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  return factor->tensor_factor.defined() ? seen_by_host(factor->tensor_factor).item().toDouble() : factor->double_factor;
}

std::vector<at::Tensor> flat(const c10::IValue& value) {
  std::vector<at::Tensor> all;
  Exchanged::replaced(value, [&all](const at::Tensor& tensor) { return all.emplace_back(tensor); });
  return all;
}

void by_gloo(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Exchanged exchanged;
  std::optional<double> factor;
  int ranks = 1;
  const auto arguments = op.schema().arguments().size();
  for (auto& value : torch::jit::last(*stack, arguments)) {
    if (value.isObject() && value.type() == c10::getCustomClassType<c10::intrusive_ptr<c10d::ProcessGroup>>()) {
      ranks = value.toCustomClass<c10d::ProcessGroup>()->getSize();
    }
  }
  for (auto i = stack->size() - arguments; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isObject() && value.type() == c10::getCustomClassType<c10::intrusive_ptr<c10d::ReduceOp>>()) {
      factor = scale_of(*value.toCustomClass<c10d::ReduceOp>(), ranks);
      if (factor) value = c10::IValue(c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::SUM));
    } else {
      value = exchanged.to_host(value);
    }
  }
  const auto outputs = (*stack)[stack->size() - arguments];
  op.callBoxed(stack);
  const auto results = op.schema().returns().size();
  for (auto i = stack->size() - results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isObject()) {
      auto work = value.toCustomClass<c10d::Work>();
      if (factor) work->wait();
      c10::intrusive_ptr<c10d::Work> ours = c10::make_intrusive<OfDevice>(std::move(work), flat(exchanged.back(outputs)));
      value = c10::IValue(std::move(ours));
    } else {
      value = exchanged.back(value);
    }
  }
  if (factor) {
    for (auto& tensor : flat(outputs)) tensor.mul_(*factor);
  }
}

// As DDP measures on a CPU.
struct HostTimer final : c10d::Timer {
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event begin, Event end) override {
    const auto from = getTimeRef(begin), to = getTimeRef(end);
    return from < 0 || to < 0 || to < from ? std::nullopt : std::optional<int64_t>(to - from);
  }
};
void resize_storage(const at::Tensor& owner, int64_t bytes) {
  auto* storage = owner.storage().unsafeGetStorageImpl();
  const OnDevice there(storage->device());
  auto memory = device_memory.allocate(bytes);
  const auto kept = std::min<size_t>(bytes, storage->nbytes());
  if (kept > 0) device_memory.copy_data(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

} // namespace

TORCH_LIBRARY(rehearsal, library) {
  library.def("resize_storage(Tensor(a!) owner, int bytes) -> ()", resize_storage);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "broadcast_", "alltoall_base_", "alltoall_", "reduce_",
        "gather_", "scatter_", "send", "recv_", "recv_any_source_", "barrier"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_gloo>());
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", make_empty);
  library.impl("empty_strided", make_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from_and_resize", copy_resized);
  library.impl("_local_scalar_dense", as_scalar);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("resize_", at::native::resize_);
  library.impl("_fused_sdp_choice", plain_attention);
  library.impl("mm.dtype", product_in);
  library.impl("addmm.dtype_out", add_product_in);
  library.impl("record_stream", record_stream);
  // A GPU has a kernel for it; what torch has for all devices asks the host where the groups end.
  library.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer)
} // namespace c10d

namespace at {
// The name is what torch looks for.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(device_now); }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return static_cast<DeviceIndex>(std::exchange(device_now, device)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void setCurrentDevice(DeviceIndex device) const override { device_now = device; }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return Guard::now(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  int getNumGPUs() const override { return DEVICES; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

extern "C" {
int rehearsal_devices() { return DEVICES; }
int rehearsal_device() { return device_now; }
void rehearsal_set_device(int device) { device_now = device; }
void rehearsal_waiting_is_an_error(int is_error) { waiting_is_an_error = is_error != 0; }
int64_t rehearsal_allocated(int device) { return allocated.at(device); }
int64_t rehearsal_peak(int device) { return peak.at(device); }
void rehearsal_reset_peak(int device) { peak.at(device) = allocated.at(device); }
}
