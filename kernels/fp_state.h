/* The floating-point state for all kernels. */
#ifndef EDGEFL_FP_STATE_H
#define EDGEFL_FP_STATE_H

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Round to nearest, and do not flush denormals to zero, whatever the settings of the calling thread are (torch can
 * enable flushing). */
typedef struct {
    uint64_t saved;
} fp_state;
static inline fp_state fp_enter(void)
{
    fp_state s = {0};
#if defined(__x86_64__)
    s.saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(s.saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
    return s;
}
static inline void fp_leave(fp_state s)
{
#if defined(__x86_64__)
    _mm_setcsr((unsigned)s.saved);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(s.saved));
#else
    (void)s;
#endif
}

#endif
