/* What the native kernels share: fixed block sizes, element types, and the functions that the Python
 * binding (module.c) calls. Block sizes are part of the result: they fix the order of partial sums. */
#ifndef EDGEFL_KERNELS_H
#define EDGEFL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Raised whenever a function's arguments or a block size changes; edgefl/kernels/selection.py holds its twin. */
#define EF_ABI 7

#define EF_TILE 2048       /* elements whose running sum stays in the L1 cache; the norms' block */
#define EF_STREAM_BYTES (1 << 20) /* past this, writing around the caches saves reading what is overwritten */
#define EF_SPAN 8          /* most tiles in one pass over a group of updates */
#define EF_LANES 8         /* interleaved double accumulators inside a block */
#define EF_SCALE_BLOCK 256 /* int8 elements that share one float32 scale */
#define EF_GROUP 6         /* most updates read in one pass over a tile */
#define EF_GRAIN 16        /* tiles that a thread takes at once */

/* Arrays may begin at any byte. */
typedef float ef_loose_float __attribute__((aligned(1)));
typedef uint16_t ef_loose_uint16 __attribute__((aligned(1)));

enum ef_dtype { EF_F32, EF_F16, EF_BF16, EF_I8 };
/* Bytes of an element. */
static inline __attribute__((always_inline)) int64_t ef_size(int dtype)
{
    return dtype == EF_F32 ? 4 : dtype == EF_I8 ? 1 : 2;
}

typedef struct {
    const void *data;
    const ef_loose_float *scales; /* int8 only: one for each EF_SCALE_BLOCK elements */
    float weight;
    int dtype;
} ef_update;

/* A server optimiser's step, made of the sum g while it is in the cache; edgefl/strategies/optimizer.py is
 * the twin. Old vectors are only read and new ones only written: a step that is cut short can be made again.
 *
 *   EF_MOMENTUM   a = keep1*a + g;           out = base + lr*a
 *   the others    a = keep1*a + add1*g;      out = base + lr*a / (sqrt(b) + epsilon)
 *   EF_ADAGRAD    b = b + g^2
 *   EF_ADAM       b = keep2*b + add2*g^2
 *   EF_YOGI       b = b - add2*(g^2 * sign(b - g^2)) */
enum ef_optimizer { EF_MOMENTUM, EF_ADAM, EF_YOGI, EF_ADAGRAD, EF_OPTIMIZERS };
typedef struct {
    int kind;
    float keep1, add1, keep2, add2, epsilon, lr;
    float *out, *new_a, *new_b; /* the b's only where the kind has one; none overlaps anything */
    const float *base, *old_a, *old_b;
} ef_step;

/* How a float32 vector x becomes an update: y = weight*x + residual, rounded to out's type. */
typedef struct {
    const ef_loose_float *x, *residual; /* residual may be NULL: none */
    float weight;
    int dtype;
    void *out;
    ef_loose_float *scales; /* int8 only, written */
    ef_loose_float *left;   /* y - decoded(out), and 0 where that is not finite; may be NULL or residual */
    /* out may be x (float32), x and residual may overlap; nothing else that is written overlaps anything. */
} ef_quantization;

/* A few updates of one type that are added in one pass over n elements, the first of them element `at`:
 * to[i] = from[i] + sum_j weight_j * update_j[at + i], and norms[j + t * stride] = the squared norm of update
 * j's tile t.
 *
 * 0 < n <= EF_SPAN * EF_TILE, and `at` is a multiple of EF_TILE. Updates, scales, from and to begin at any
 * byte; with `stream`, to is aligned to 64 bytes. `to` may be `from` and overlaps nothing else. */
typedef struct {
    const ef_update *u;
    int64_t at, n;
    const float *from;
    float *to;
    double *norms;
    int64_t stride;
    int stream; /* write around the caches */
    int fresh;  /* from is not in the cache yet */
} ef_group;

/* One instruction set's functions. Offsets and counts are in elements; arrays begin at any byte and do not
 * overlap, but for what is said. All run in the floating-point state of fp_state.h. */
typedef struct {
    const char *name;
    void (*group[4])(int count, const ef_group *g); /* for each ef_dtype, 1 <= count <= EF_GROUP */
    unsigned char most[4];                          /* the largest group whose members stay in registers */
    /* The step s at elements at <= i < at + n, of which g is the sum. With `stream`, all that is written is
     * aligned to 64 bytes where i is a multiple of 16, and so is `at`. */
    void (*step)(const ef_step *s, int stream, const float *g, int64_t at, int64_t n);
    /* Elements from `at`, a multiple of EF_SCALE_BLOCK; what overlaps is as ef_quantization says. */
    void (*quantize)(const ef_quantization *q, int64_t at, int64_t n);
    /* The squared norm of n <= EF_TILE elements from `at`, a multiple of EF_TILE. */
    double (*block_norm)(const ef_update *u, int64_t at, int64_t n);
    /* s[0] += sum w_i, s[1] += sum (i + 1) * w_i over n 32-bit words, both modulo 2^64, i counted from 0. */
    void (*words)(const unsigned char *p, int64_t n, uint64_t s[2]);
    /* out = trained - base, s as above of the words of out; `around`: past the caches, out aligned to 64 bytes.
     * trained and base may overlap each other. */
    void (*delta)(ef_loose_float *__restrict out, const ef_loose_float *trained, const ef_loose_float *base,
                  int64_t n, int around, uint64_t s[2]);
} ef_isa;

/* cpu.c */
const ef_isa *ef_isa_now(void);
int ef_isa_set(const char *name); /* 0: not there */
const char *ef_isa_name(int i);   /* i-th usable one, fastest first; NULL after the last */
/* out = base + the updates' sum, or the step of that sum: then out is not used. base, checksums and step may be
 * NULL. out may be base; nothing else that is written overlaps anything. Arrays begin at any byte. -1: no memory. */
int ef_weighted_sum(float *out, const float *base, const ef_update *u, int64_t count, int64_t n,
                    double *norms, uint64_t *checksums, const ef_step *step, int threads);
/* norm: of what was written, as ef_sq_norm gives it. -1: no memory. */
int ef_quantize(const ef_quantization *q, int64_t n, int threads, double *norm);
int ef_sq_norm(const ef_update *u, int64_t n, int threads, double *norm); /* -1: no memory */
uint64_t ef_folded(const uint64_t s[2], const unsigned char *p, int64_t bytes); /* s: of all whole words */
uint64_t ef_checksum(const unsigned char *p, int64_t bytes, int threads);

/* pool.c: runs task(context, i) for every 0 <= i < count on up to `threads` threads, the caller among them. */
typedef void (*ef_task)(void *context, int64_t i);
void ef_pool_run(ef_task task, void *context, int64_t count, int threads);
void ef_pool_close(void);
int ef_pool_size(void);

/* staleness.c */
enum ef_average { EF_WINDOW, EF_CUMULATIVE, EF_EXPONENTIAL };
typedef struct {
    int mode;
    int64_t clients, width; /* width: entries kept for a client (the window's length, else 1) */
    double decay;
    int64_t *count; /* clients */
    double *state;  /* clients x width */
} ef_means;
double ef_mean(const ef_means *m, int64_t client);
double ef_observe(const ef_means *m, int64_t client, double value);

#endif
