/* An update and its checksum in one pass over memory: out = trained - base. */
#include "binding.h"
#include "fp_state.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PIECE 4096 /* elements: what was computed is in the nearest cache when its words are summed */

/* Write n elements to out, around the caches if asked to: then out is aligned to 64 bytes. */
static void put(ef_loose_float *out, const float *from, int64_t n, int around)
{
    int64_t i = 0;
#if defined(__x86_64__)
    for (; around && i + 4 <= n; i += 4) _mm_stream_ps((float *)(out + i), _mm_load_ps(from + i));
#else
    (void)around;
#endif
    memcpy(out + i, from + i, (size_t)(n - i) * 4);
}

static uint64_t delta_of(ef_loose_float *out, const ef_loose_float *trained, const ef_loose_float *base, int64_t n)
{
    const ef_isa *isa = ef_isa_now();
    const int around = 4 * n >= EF_STREAM_BYTES && (uintptr_t)out % 64 == 0;
    float few[PIECE] __attribute__((aligned(64)));
    uint64_t all[2] = {0, 0};
    const fp_state fp = fp_enter();
    for (int64_t at = 0; at < n; at += PIECE) {
        const int64_t size = n - at < PIECE ? n - at : PIECE;
        uint64_t s[2] = {0, 0};
        for (int64_t i = 0; i < size; i++) few[i] = trained[at + i] - base[at + i];
        isa->words((const unsigned char *)few, size, s);
        put(out + at, few, size, around);
        all[0] += s[0];
        all[1] += s[1] + (uint64_t)at * s[0];
    }
    fp_leave(fp);
#if defined(__x86_64__)
    if (around) _mm_sfence();
#endif
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
