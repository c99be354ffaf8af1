// Device code embedded by the build, empty for a target that is not built. HISPARSE_CUDA_ARCHS and
// HISPARSE_ROCM_ARCHS, defined by the build too, say what is in it.
#pragma once

#include "build_config.h"  // written by the build

extern "C" {
extern const unsigned char hisparse_cuda_image[], hisparse_cuda_image_end[];  // a fat binary
extern const unsigned char hisparse_rocm_image[], hisparse_rocm_image_end[];  // a bundle of code objects
}
