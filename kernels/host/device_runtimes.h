// The targets whose driver is found at run time. Getting one loads nothing; its methods raise
// std::runtime_error that says what is missing: the image in this build, the driver, or a device.
#pragma once

#include "runtime.h"

namespace hisparse::host {

Runtime& cuda_runtime();
Runtime& hip_runtime();

}  // namespace hisparse::host
