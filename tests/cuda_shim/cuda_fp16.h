/* Halves on the CPU; see cuda_runtime.h. */
#pragma once
#include <stdint.h>
#include <string.h>

typedef _Float16 __half;
static inline __half __ushort_as_half(uint16_t bits)
{
    __half made;
    memcpy(&made, &bits, sizeof made);
    return made;
}
static inline float __half2float(__half x) { return (float)x; }
