/* Python binding that computes an update, out = trained - base, and its checksum in one pass over memory. */
#include "binding.h"
#include "fp_state.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static uint64_t delta_of(ef_loose_float *out, const ef_loose_float *trained, const ef_loose_float *base, int64_t n)
{
    const int around = 4 * n >= EF_STREAM_BYTES && (uintptr_t)out % 64 == 0;
    uint64_t s[2] = {0, 0};
    const fp_state fp = fp_enter();
    ef_isa_now()->delta(out, trained, base, n, around, s);
    fp_leave(fp);
#if defined(__x86_64__)
    if (around) _mm_sfence();
#endif
    return ef_folded(s, (const unsigned char *)out, 4 * n);
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
        PyThreadState *state = leave_gil(views[0].len);
        sum = delta_of(views[0].buf, views[1].buf, views[2].buf, views[0].len / 4);
        take_gil(state);
    }
    release(views, 3);
    return ok ? PyLong_FromUnsignedLongLong(sum) : Py_NewRef(Py_None);
}
