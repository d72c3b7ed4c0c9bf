/* CUDA's functions as far as kernels/cuda.cu uses them, on the CPU: kernels run thread by thread, copies are memcpy.
 *
 * The threads of a block are coroutines that take turns: each runs until it exchanges values with its warp or waits
 * for the block, and continues when all others have come to the same point. What a GPU does and this does not show:
 * threads that run at once, and copies that overlap kernels. Misaligned wide accesses abort, as on a GPU. */
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct shim_index { unsigned x; };

/* ---- threads of a block --------------------------------------------------------------------------------------- */

static shim_index threadIdx, blockIdx;

struct shim_thread {
    jmp_buf point;
    char ended, stack[32 << 10];
    uint64_t given; /* to its warp */
};
struct shim_block {
    std::vector<shim_thread> threads;
    std::function<void()> body;
    jmp_buf scheduler;

    static void enter();
    /* The first turn switches contexts; later ones jump, which needs no system call. */
    void turn(unsigned t, bool begins)
    {
        threadIdx.x = t;
        if (_setjmp(scheduler)) return;
        if (!begins) _longjmp(threads[t].point, 1);
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = threads[t].stack, context.uc_stack.ss_size = sizeof threads[t].stack;
        context.uc_link = nullptr;
        makecontext(&context, enter, 0);
        setcontext(&context);
    }
    void run(unsigned count, const std::function<void()> &kernel)
    {
        body = kernel;
        threads.resize(count);
        for (auto &thread : threads) thread.ended = 0, thread.given = 0;
        unsigned left = count;
        for (bool begins = true; left; begins = false)
            for (unsigned t = 0; t < count; t++)
                if (!threads[t].ended) turn(t, begins), left -= threads[t].ended;
    }
    void wait()
    {
        if (!_setjmp(threads[threadIdx.x].point)) _longjmp(scheduler, 1);
    }
};
static shim_block shim;
void shim_block::enter()
{
    shim.body();
    shim.threads[threadIdx.x].ended = 1;
    _longjmp(shim.scheduler, 1);
}

#define LAUNCH(kernel, blocks, stream, ...)                                                                            \
    do {                                                                                                               \
        for (blockIdx.x = 0; blockIdx.x < (blocks); blockIdx.x++) shim.run(THREADS, [&] { kernel(__VA_ARGS__); });     \
    } while (0)

static inline void __syncthreads() { shim.wait(); }
template <class T> T __shfl_down_sync(unsigned, T value, int distance)
{
    const unsigned t = threadIdx.x;
    memcpy(&shim.threads[t].given, &value, sizeof value);
    shim.wait();
    if (t % 32 + distance < 32) memcpy(&value, &shim.threads[t + distance].given, sizeof value);
    return value;
}
template <class T> T atomicAdd(T *to, T value)
{
    const T old = *to;
    *to += value;
    return old;
}
template <class T> T atomicMax(T *to, T value)
{
    const T old = *to;
    *to = value > old ? value : old;
    return old;
}

/* ---- arithmetic and memory ------------------------------------------------------------------------------------- */

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline int __float2int_rn(float a) { return (int)nearbyintf(a); }
static inline float __int2float_rn(int a) { return (float)a; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __uint_as_float(uint32_t bits)
{
    float made;
    memcpy(&made, &bits, sizeof made);
    return made;
}
template <class T> T *shim_aligned(T *p)
{
    if ((uintptr_t)p % sizeof(T)) fprintf(stderr, "misaligned access of %zu bytes\n", sizeof(T)), abort();
    return p;
}
template <class T> T __ldcs(const T *p) { return *shim_aligned(p); }
template <class T> void __stcs(T *p, T value) { *shim_aligned(p) = value; }

/* ---- the runtime ----------------------------------------------------------------------------------------------- */

typedef int cudaError_t;
typedef int *cudaStream_t;
enum { cudaSuccess, cudaHostRegisterPortable, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaStreamNonBlocking };
static inline const char *cudaGetErrorString(cudaError_t) { return "no memory"; }
static cudaError_t shim_last = cudaSuccess; /* error of the last failed call; successful calls do not clear it */
static inline cudaError_t cudaGetLastError()
{
    const cudaError_t last = shim_last;
    shim_last = cudaSuccess;
    return last;
}
static inline cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, int) { return *s = new int, cudaSuccess; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaHostRegister(void *, size_t, int) { return cudaSuccess; }
static inline cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
static inline cudaError_t cudaFree(void *p) { return free(p), cudaSuccess; }
size_t shim_allocated; /* bytes of the last allocation */
static inline cudaError_t cudaMalloc(char **p, size_t bytes)
{
    shim_allocated = bytes;
    *p = (char *)aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (*p) memset(*p, 0xA5, bytes); /* nothing may rely on zeros */
    if (*p || !bytes) return cudaSuccess;
    return shim_last = 1;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, cudaStream_t)
{
    if (bytes) memcpy(to, from, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t)
{
    if (bytes) memset(p, value, bytes);
    return cudaSuccess;
}
