/* What the native kernels share: fixed block sizes, element types, and the functions that the Python
 * binding (module.c) calls. Block sizes are part of the result: they fix the order of partial sums. */
#ifndef EDGEFL_KERNELS_H
#define EDGEFL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Raised whenever a function's arguments or a block size changes; edgefl/kernels/selection.py holds its twin. */
#define EF_ABI 5

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
    float *out, *new_a, *new_b; /* the b's only where the kind has one */
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
} ef_quantization;

/* One instruction set's functions. Offsets and counts are in elements (checksum: 32-bit words). */
typedef struct {
    const char *name;
    /* dst[i] = src[i] + sum_j weight_j * update_j[at + i] for i < n <= EF_SPAN * EF_TILE; norms[t * count + j] =
     * the squared norm of update j's tile t; unless sums is NULL, sums[2j], sums[2j + 1] += the span's words' two
     * sums (see below). With a step, its vectors are written and out is not. */
    void (*span)(float *out, const float *base, const ef_update *u, int64_t count, int64_t at, int64_t n,
                 double *norms, uint64_t *sums, const ef_step *step, int stream);
    void (*quantize)(const ef_quantization *q, int64_t at, int64_t n);
    double (*block_norm)(const ef_update *u, int64_t at, int64_t n);
    /* s[0] += sum w_i, s[1] += sum (i + 1) * w_i, both modulo 2^64, i counted from 0. */
    void (*words)(const unsigned char *p, int64_t n, uint64_t s[2]);
    /* out = trained - base, s as above of the words of out; `around`: past the caches, out aligned to 64 bytes. */
    void (*delta)(ef_loose_float *out, const ef_loose_float *trained, const ef_loose_float *base, int64_t n, int around,
                  uint64_t s[2]);
    uint64_t (*read)(const unsigned char *p, int64_t bytes);
} ef_isa;

/* cpu.c */
extern const ef_isa *ef_isa_now(void);
int ef_isa_set(const char *name); /* 0: not there */
const char *ef_isa_name(int i);   /* i-th usable one, fastest first; NULL after the last */
/* checksums and step may be NULL; with a step, out is not used. -1: no memory. */
int ef_weighted_sum(float *out, const float *base, const ef_update *u, int64_t count, int64_t n,
                    double *norms, uint64_t *checksums, const ef_step *step, int threads);
/* norm: of what was written, as ef_sq_norm gives it. -1: no memory. */
int ef_quantize(const ef_quantization *q, int64_t n, int threads, double *norm);
int ef_sq_norm(const ef_update *u, int64_t n, int threads, double *norm); /* -1: no memory */
uint64_t ef_folded(const uint64_t s[2], const unsigned char *p, int64_t bytes); /* s: of all whole words */
uint64_t ef_checksum(const unsigned char *p, int64_t bytes, int threads);
uint64_t ef_read(const unsigned char *const *p, int64_t count, int64_t bytes, int threads);
void ef_triad(float *a, const float *b, const float *c, float scalar, int64_t n, int threads);
void ef_copy(unsigned char *dst, const unsigned char *src, int64_t bytes, int threads);

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
