/* The CUDA back end: sums and steps over device memory, and over host memory through a pipeline that copies
 * one chunk while it sums another. A shared library of its own behind a plain C interface, so that edgefl
 * builds and runs without CUDA; edgefl/kernels/backend_cuda.py loads it.
 *
 * This is the host's side; cuda_kernels.cuh is the device's.
 * edgefl/kernels/cuda_library.py has the command that builds it. */
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <mutex>
#include <vector>

#include "cuda_kernels.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int64_t CHUNK = 64 * TILE;          /* elements copied at once from the host */
constexpr int STREAMS = 2;

thread_local char message[200];

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        const cudaError_t error = (call);                                                                    \
        if (error != cudaSuccess) {                                                                          \
            snprintf(message, sizeof message, "%s: %s", #call, cudaGetErrorString(error));                   \
            return -1;                                                                                       \
        }                                                                                                    \
    } while (0)

size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Device memory that grows and is kept from call to call; one call at a time. */
struct arena {
    char *memory = nullptr;
    size_t size = 0, used = 0;
    int reserve(size_t bytes)
    {
        used = 0;
        if (bytes <= size) return 0;
        if (memory) cudaFree(memory);
        memory = nullptr, size = 0;
        TRY(cudaMalloc(&memory, bytes));
        size = bytes;
        return 0;
    }
    void *take(size_t bytes)
    {
        void *p = memory + used;
        used += padded(bytes);
        return p;
    }
};
std::mutex in_use;
arena device;
cudaStream_t streams[STREAMS];

int make_streams()
{
    for (auto &stream : streams)
        if (!stream) TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return 0;
}

int64_t size_of(int dtype) { return dtype == EF_F32 ? 4 : dtype == EF_I8 ? 1 : 2; }
int64_t tiles_of(int64_t n) { return (n + TILE - 1) / TILE; }
int64_t blocks_of(int64_t n) { return (n + EF_SCALE_BLOCK - 1) / EF_SCALE_BLOCK; }

/* What every call needs on the device besides vectors. */
struct results {
    double *partial, *norms;
    words *sums;
};

int finish(const results &r, int64_t count, int64_t n, double *norms, uint64_t *sums, cudaStream_t stream)
{
    if (count) add_norms<<<(unsigned)count, THREADS, 0, stream>>>(r.partial, tiles_of(n), count, r.norms);
    TRY(cudaGetLastError());
    TRY(cudaMemcpyAsync(norms, r.norms, count * sizeof(double), cudaMemcpyDeviceToHost, stream));
    if (sums) TRY(cudaMemcpyAsync(sums, r.sums, count * sizeof(words), cudaMemcpyDeviceToHost, stream));
    TRY(cudaStreamSynchronize(stream));
    return 0;
}

size_t results_bytes(int64_t count, int64_t n)
{
    return padded(tiles_of(n) * count * WARPS * 8) + padded(count * 8) + padded(count * sizeof(words));
}

results make_results(int64_t count, int64_t n)
{
    return {(double *)device.take(tiles_of(n) * count * WARPS * 8), (double *)device.take(count * 8),
            (words *)device.take(count * sizeof(words))};
}

} // namespace
EXPORT int efc_abi(void) { return EF_ABI; }
EXPORT const char *efc_error(void) { return message; }
/* Devices that can be used; -1 with a reason in efc_error. */
EXPORT int efc_devices(void)
{
    int count = 0;
    TRY(cudaGetDeviceCount(&count));
    return count;
}

/* Page-locks host memory (the parameter buffer, once), so that copies overlap the sum. */
EXPORT int efc_register(void *memory, int64_t bytes)
{
    TRY(cudaHostRegister(memory, (size_t)bytes, cudaHostRegisterPortable));
    return 0;
}
EXPORT int efc_unregister(void *memory)
{
    TRY(cudaHostUnregister(memory));
    return 0;
}

/* On host memory, at any alignment: chunk by chunk, two streams taking turns. */
EXPORT int efc_sum_host(float *out, const float *base, const ef_update *u, int64_t count, int64_t n, double *norms,
                        uint64_t *sums, const ef_step *step)
{
    const std::lock_guard<std::mutex> guard(in_use);
    const int64_t most = n < CHUNK ? n : CHUNK;
    const int state = !step ? 0 : step->kind == EF_MOMENTUM ? 1 : 2;
    size_t lane = padded(most * 4) * (2 + 2 * state) + padded(count * sizeof *u);
    for (int64_t k = 0; k < count; k++) lane += padded(most * size_of(u[k].dtype)) + padded(blocks_of(most) * 4);
    if (make_streams() || device.reserve(results_bytes(count, n) + STREAMS * lane)) return -1;
    const results r = make_results(count, n);
    TRY(cudaMemsetAsync(r.sums, 0, count * sizeof(words), streams[0]));
    TRY(cudaStreamSynchronize(streams[0]));
    const size_t shared = device.used;
    std::vector<ef_update> list(STREAMS * count);
    for (int64_t first = 0, turn = 0; first < n; first += CHUNK, turn++) {
        const int64_t m = n - first < CHUNK ? n - first : CHUNK;
        const cudaStream_t stream = streams[turn % STREAMS];
        ef_update *mine = list.data() + turn % STREAMS * count;
        TRY(cudaStreamSynchronize(stream)); /* its list and its buffers are about to be used again */
        device.used = shared + turn % STREAMS * lane;
#define TO(name, source, bytes)                                                                              \
    void *name = device.take(bytes);                                                                         \
    TRY(cudaMemcpyAsync(name, source, bytes, cudaMemcpyHostToDevice, stream))
        float *total = (float *)device.take(m * 4);
        const float *model = step ? step->base : base;
        ef_step s = step ? *step : ef_step{};
        void *from = device.take(m * 4);
        if (model) TRY(cudaMemcpyAsync(from, model + first, m * 4, cudaMemcpyHostToDevice, stream));
        if (step) {
            TO(old_a, step->old_a + first, m * 4);
            s.base = (float *)from, s.out = total, s.old_a = (float *)old_a, s.new_a = (float *)device.take(m * 4);
            if (state == 2) {
                TO(old_b, step->old_b + first, m * 4);
                s.old_b = (float *)old_b, s.new_b = (float *)device.take(m * 4);
            }
        }
        for (int64_t k = 0; k < count; k++) {
            const int64_t size = size_of(u[k].dtype);
            TO(vector, (const char *)u[k].data + first * size, m * size);
            mine[k] = u[k];
            mine[k].data = vector;
            if (u[k].dtype != EF_I8) continue;
            TO(scales, u[k].scales + first / EF_SCALE_BLOCK, blocks_of(m) * 4);
            mine[k].scales = (const ef_loose_float *)scales;
        }
        TO(sent, mine, count * sizeof *mine);
#undef TO
        double *partial = r.partial + first / TILE * count * WARPS;
        sum_part(total, step || !base ? nullptr : (const float *)from, (const ef_update *)sent, count, m, first, partial,
                 sums ? r.sums : nullptr, step ? &s : nullptr, stream);
        TRY(cudaGetLastError());
        float *const made[] = {step ? step->out : out, step ? step->new_a : nullptr, state == 2 ? step->new_b : nullptr};
        float *const from_device[] = {total, s.new_a, s.new_b};
        for (int v = 0; v <= state; v++)
            TRY(cudaMemcpyAsync(made[v] + first, from_device[v], m * 4, cudaMemcpyDeviceToHost, stream));
    }
    for (auto stream : streams) TRY(cudaStreamSynchronize(stream));
    return finish(r, count, n, norms, sums, streams[0]);
}
