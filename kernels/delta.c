/* An update and its checksum in one pass over memory: out = trained - base. */
#include "binding.h"
#include "fp_state.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PIECE 4096 /* elements: what was written is in the nearest cache when its words are summed */
#define STREAM_BYTES (1 << 20) /* past this many, writing around the caches saves reading what is overwritten */

#if defined(__x86_64__)
/* n a multiple of 16, out aligned to 64 bytes. */
static void stream(float *out, const float *from, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16)
        for (int j = 0; j < 16; j += 4) _mm_stream_ps(out + i + j, _mm_load_ps(from + i + j));
}
#endif

static uint64_t delta_of(ef_loose_float *restrict out, const ef_loose_float *trained, const ef_loose_float *base,
                         int64_t n)
{
    const ef_isa *isa = ef_isa_now();
    uint64_t all[2] = {0, 0};
    int64_t at = 0;
    const fp_state fp = fp_enter();
#if defined(__x86_64__)
    if (4 * n >= STREAM_BYTES && (uintptr_t)out % 64 == 0) {
        float few[PIECE] __attribute__((aligned(64)));
        for (; at + PIECE <= n; at += PIECE) {
            uint64_t s[2] = {0, 0};
            for (int64_t i = 0; i < PIECE; i++) few[i] = trained[at + i] - base[at + i];
            isa->words((const unsigned char *)few, PIECE, s);
            stream((float *)(out + at), few, PIECE);
            all[0] += s[0];
            all[1] += s[1] + (uint64_t)at * s[0];
        }
        _mm_sfence();
    }
#endif
    for (; at < n; at += PIECE) {
        const int64_t end = n - at < PIECE ? n : at + PIECE;
        uint64_t s[2] = {0, 0};
        for (int64_t i = at; i < end; i++) out[i] = trained[i] - base[i];
        isa->words((const unsigned char *)(out + at), end - at, s);
        all[0] += s[0];
        all[1] += s[1] + (uint64_t)at * s[0];
    }
    fp_leave(fp);
    return ef_folded(all, (const unsigned char *)out, 4 * n);
}

/* delta(out, trained, base) -> the checksum of out, or None: see module.c */
PyObject *ef_py_delta(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[3] = {{0}};
    uint64_t sum = 0;
    int ok = 1;
    (void)self;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "delta takes 3 arguments (got %zd)", nargs);
    for (int i = 0; ok && i < 3; i++) {
        ok = flat(args[i], &views[i], i == 0) && is_format(&views[i], 'f', 4) && views[i].len == views[0].len;
        if (ok && i > 0) ok = !overlap(&views[0], &views[i]);
    }
    if (ok) {
        const int64_t n = views[0].len / 4;
        if (views[0].len < GIL_BYTES) {
            sum = delta_of(views[0].buf, views[1].buf, views[2].buf, n);
        } else {
            Py_BEGIN_ALLOW_THREADS
            sum = delta_of(views[0].buf, views[1].buf, views[2].buf, n);
            Py_END_ALLOW_THREADS
        }
    }
    release(views, 3);
    return ok ? PyLong_FromUnsignedLongLong(sum) : Py_NewRef(Py_None);
}
