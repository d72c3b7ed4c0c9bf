/* Vectors of 8 floats in one AVX2 register. The square of a float32 is exact in a double, so the fused
 * multiply-add of the norms rounds as a product and a sum do; the float32 sum itself is never fused. */
#define EF(name) name##_avx2
#define EF_ISA_NAME "avx2"
#define EF_TARGET __attribute__((target("avx2,fma,f16c")))
#define EF_W 8
#define EF_F32_VECTORS 2
#define EF_HALF_VECTORS 2
#define EF_GROUP_SIZES {4, 3, 3, 3}

typedef __m256 EF(V);
typedef struct { __m256d l[2]; } EF(N);
typedef __m256i EF(I);
typedef uint64_t EF(U) __attribute__((vector_size(32)));

EF_PRIM EF(V) EF(vset)(float x) { return _mm256_set1_ps(x); }
EF_PRIM EF(V) EF(vload)(const void *p) { return _mm256_loadu_ps((const float *)p); }
EF_PRIM void EF(vstore)(float *p, EF(V) v) { _mm256_storeu_ps(p, v); }
EF_PRIM void EF(vstream)(float *p, EF(V) v) { _mm256_stream_ps(p, v); }
EF_PRIM EF(V) EF(vmul)(EF(V) x, EF(V) y) { return _mm256_mul_ps(x, y); }
EF_PRIM EF(V) EF(vadd)(EF(V) x, EF(V) y) { return _mm256_add_ps(x, y); }
EF_PRIM EF(V) EF(vsub)(EF(V) x, EF(V) y) { return _mm256_sub_ps(x, y); }
EF_PRIM EF(V) EF(vdiv)(EF(V) x, EF(V) y) { return _mm256_div_ps(x, y); }
EF_PRIM EF(V) EF(vsqrt)(EF(V) x) { return _mm256_sqrt_ps(x); }
EF_PRIM EF(V) EF(vsign)(EF(V) x)
{
    const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f), less = _mm256_set1_ps(-1.0f);
    __m256 sign = _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ), one);
    sign = _mm256_or_ps(sign, _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_LT_OQ), less));
    return _mm256_or_ps(sign, _mm256_and_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q), x));
}
EF_PRIM void EF(vstore_f16)(void *p, EF(V) v) { _mm_storeu_si128(p, _mm256_cvtps_ph(v, 0)); }
EF_PRIM EF(V) EF(vload_f16)(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
EF_PRIM EF(V) EF(vload_bf16)(const void *p)
{
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
EF_PRIM EF(V) EF(vload_i8)(const void *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

EF_PRIM EF(N) EF(nzero)(void) { return (EF(N)){{_mm256_setzero_pd(), _mm256_setzero_pd()}}; }
EF_PRIM EF(N) EF(nadd_halves)(EF(N) n, __m128 low, __m128 high)
{
    __m256d lo = _mm256_cvtps_pd(low), hi = _mm256_cvtps_pd(high);
    return (EF(N)){{_mm256_fmadd_pd(lo, lo, n.l[0]), _mm256_fmadd_pd(hi, hi, n.l[1])}};
}
EF_PRIM EF(N) EF(nadd)(EF(N) n, EF(V) v)
{
    return EF(nadd_halves)(n, _mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
/* Widening from memory spares two shuffles a vector: a sum that is in the cache runs 1.5 times as fast. */
EF_PRIM EF(N) EF(nadd_at)(EF(N) n, const void *p)
{
    return EF(nadd_halves)(n, _mm_loadu_ps((const float *)p), _mm_loadu_ps((const float *)p + 4));
}
/* The same for a vector of halves: by way of the stack, where it is widened from memory. The square of a
 * float16 is exact in float32 already, and additions run beside the products of the sum. */
EF_PRIM EF(N) EF(nadd_half)(const int dtype, EF(N) n, EF(V) v)
{
    float x[8] __attribute__((aligned(32)));
    _mm256_store_ps(x, dtype == EF_F16 ? _mm256_mul_ps(v, v) : v);
    __asm__("" : "+m"(x)); /* or the compiler would see through it */
    if (dtype != EF_F16) return EF(nadd_at)(n, x);
    return (EF(N)){{_mm256_add_pd(n.l[0], _mm256_cvtps_pd(_mm_load_ps(x))),
                    _mm256_add_pd(n.l[1], _mm256_cvtps_pd(_mm_load_ps(x + 4)))}};
}
EF_PRIM void EF(nlanes)(double *lanes, EF(N) n)
{
    _mm256_storeu_pd(lanes, n.l[0]);
    _mm256_storeu_pd(lanes + 4, n.l[1]);
}

/* Squares of 32 int8 added up as integers: at most a scale block's 256 x 128^2 in a lane. */
EF_PRIM EF(I) EF(izero)(void) { return _mm256_setzero_si256(); }
EF_PRIM EF(I) EF(iadd)(EF(I) sum, const void *p)
{
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    const __m256i y = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p + 1));
    return _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_madd_epi16(x, x)), _mm256_madd_epi16(y, y));
}
EF_PRIM int32_t EF(isum)(EF(I) sum)
{
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
