// A CUDA device that is not there, for a torch that was built without CUDA: tensors may say `cuda`, and nothing runs.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
struct NoCard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  // No device: with one, autograd would start a thread for it, after which a process cannot be forked.
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }
};
}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, NoCard);
