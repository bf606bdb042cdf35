// A CUDA device for FakeTensorMode on torch's CPU build: a guard and hooks that do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
const Device ONLY(CUDA, 0);
const Stream DEFAULT(Stream::DEFAULT, ONLY);

struct Guard : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return ONLY; }
  Device exchangeDevice(Device) const override { return ONLY; }
  Stream getStream(Device) const noexcept override { return DEFAULT; }
  Stream getNewStream(Device, int) const override { return DEFAULT; }
  Stream exchangeStream(Stream) const noexcept override { return DEFAULT; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override {}
};
namespace at { C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks) }
