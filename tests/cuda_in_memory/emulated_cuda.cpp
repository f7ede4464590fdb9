// A CUDA device in host memory, for tests on machines without a GPU: its tensors are computed by the CPU's kernels.
//
// Every operator that PyTorch has no kernel for on the device is called again with tensors of the CPU that lie where
// those of the device do; what it gives, or changes in place, is the device's. So autograd, autocast, copies, streams'
// users and everything that asks for "cuda" run as on a GPU, and tensors on two devices at once are refused. No kernel
// of CUDA runs and nothing is queued: it shows that code for GPUs computes what it should, not how fast, nor that
// nothing is read before it is there.
//
// It must be in the process before PyTorch is imported, which looks only once for who knows of CUDA.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::CUDA;
const c10::Device the_device(kDevice, 0);

// What there is of one kind of memory.
struct Account {
  void add(int64_t bytes) {
    const int64_t now = now_ += bytes;
    for (int64_t peak = peak_; now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
  }

  std::atomic<int64_t> now_ = 0, peak_ = 0;
};

Account on_device, in_pinned;

std::mutex pinned_lock;
std::unordered_map<const void*, int64_t> pinned, allocated;

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    in_pinned.add(-pinned[data]);
    pinned.erase(data);
  }
  c10::free_cpu(data);
}

void free_device(void* data) {
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    on_device.add(-allocated[data]);
    allocated.erase(data);
  }
  c10::free_cpu(data);
}

// Host memory that is said to be the device's, or pinned.
struct Memory final : c10::Allocator {
  Memory(c10::Device device, c10::DeleterFnPtr free) : device_(device), free_(free) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes ? bytes : 1);
    const bool pins = free_ == &free_pinned;
    std::lock_guard<std::mutex> held(pinned_lock);
    (pins ? pinned : allocated)[data] = static_cast<int64_t>(bytes);
    (pins ? in_pinned : on_device).add(static_cast<int64_t>(bytes));
    return {data, data, free_, device_};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  c10::Device device_;
  c10::DeleterFnPtr free_;
};

Memory device_memory(the_device, &free_device);
Memory pinned_memory(c10::Device(c10::kCPU), &free_pinned);

struct CUDAHooks : at::CUDAHooksInterface {  // PyTorch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Device getDeviceFromPtr(void*) const override { return the_device; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(pinned_lock);
    return pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, the_device); }
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Device getDevice() const override { return the_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

// Memory of the device that belongs to a storage of the host, and keeps it.
struct Kept {
  explicit Kept(const c10::Storage& storage) : storage_(storage), bytes_(static_cast<int64_t>(storage.nbytes())) {
    on_device.add(bytes_);
  }
  ~Kept() { on_device.add(-bytes_); }

  c10::Storage storage_;
  const int64_t bytes_;
};

c10::DataPtr part_of(const c10::Storage& storage) {
  auto let_go = [](void* kept) { delete static_cast<Kept*>(kept); };
  return {storage.mutable_data(), new Kept(storage), let_go, the_device};
}

at::Tensor tensor_in(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// One call of an operator: the tensors of the CPU in the place of those of the device.
class Call {
 public:
  explicit Call(bool mixes) : mixes_(mixes) {}

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == kDevice) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(to_host(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<at::Tensor>(to_host(*tensor)) : tensor);
      return list;
    }
    return value;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(to_device(tensor));
      return list;
    }
    return value;
  }

  // What was to be written to may have been given another size, and other memory.
  void follow() {
    for (auto& [tensor, host] : given_) {
      c10::StorageImpl* own = tensor.storage().unsafeGetStorageImpl();
      if (host.storage().nbytes() != own->nbytes()) {
        own->set_data_ptr_noswap(part_of(host.storage()));
        own->set_nbytes(host.storage().nbytes());
      }
      if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const bool device = tensor.device().type() == kDevice;
    (device ? device_seen_ : host_seen_) |= device || tensor.dim() > 0;  // a number may come from anywhere
    TORCH_CHECK(
        mixes_ || !(device_seen_ && host_seen_),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!");
    if (!device) {
      from_host_.push_back(tensor);
      return tensor;
    }
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    auto known = on_host_.find(storage);
    if (known == on_host_.end()) {
      c10::DataPtr data(storage->mutable_data(), c10::Device(c10::kCPU));
      c10::Storage there(
          c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      known = on_host_.emplace(storage, there).first;
      on_device_.emplace(there.unsafeGetStorageImpl(), tensor.storage());
    }
    at::Tensor host = tensor_in(known->second, c10::DispatchKey::CPU, tensor);
    given_.emplace_back(tensor, host);
    return host;
  }

  at::Tensor to_device(const at::Tensor& host) {
    if (!host.defined() || host.device().type() != c10::kCPU) return host;
    for (const auto& [tensor, given] : given_)
      if (given.is_same(host)) return tensor;
    for (const auto& tensor : from_host_)
      if (tensor.is_same(host)) return tensor;
    c10::StorageImpl* storage = host.storage().unsafeGetStorageImpl();
    auto known = on_device_.find(storage);
    if (known == on_device_.end()) {
      c10::Storage there(
          c10::Storage::use_byte_size_t(), storage->nbytes(), part_of(host.storage()), &device_memory, false);
      known = on_device_.emplace(storage, there).first;
    }
    return tensor_in(known->second, c10::DispatchKey::CUDA, host);
  }

  const bool mixes_;
  bool device_seen_ = false, host_seen_ = false;
  std::unordered_map<c10::StorageImpl*, c10::Storage> on_host_, on_device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> given_;  // of the device, and in its place
  std::vector<at::Tensor> from_host_;
};

template <bool mixes>
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowAutograd below;
  Call call(mixes);
  const size_t arguments = op.schema().arguments().size(), results = op.schema().returns().size();
  for (size_t i = stack->size() - arguments; i < stack->size(); ++i) (*stack)[i] = call.to_host((*stack)[i]);
  op.callBoxed(stack);
  call.follow();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) (*stack)[i] = call.to_device((*stack)[i]);
}

// The one made of parts: the others have kernels of their own.
int64_t attention_of_parts(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

const bool has_memory = [] {
  c10::SetAllocator(kDevice, &device_memory);
  return true;
}();

}  // namespace

// For `torch.cuda.memory`: bytes of tensors, without temporaries within a kernel.
extern "C" int64_t emulated_device_bytes() { return on_device.now_; }
extern "C" int64_t emulated_device_peak_bytes() { return on_device.peak_; }
extern "C" int64_t emulated_pinned_bytes() { return in_pinned.now_; }
extern "C" void emulated_device_reset_peak() { on_device.peak_ = on_device.now_.load(); }

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host<false>>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // CUDA takes tensors of the host for these, too.
  for (const char* name :
       {"copy_", "index.Tensor", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index.Tensor"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host<true>>());
  m.impl("_fused_sdp_choice", &attention_of_parts);
}
