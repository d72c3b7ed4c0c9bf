/* Vectors of 8 floats in one AVX2 register. The square of a float32 is exact in a double, so the fused
 * multiply-add of the norms rounds as a product and a sum do; the float32 sum itself is never fused. */
#define EF(name) name##_avx2
#define EF_ISA_NAME "avx2"
#define EF_TARGET __attribute__((target("avx2,fma,f16c")))
#define EF_W 8
#define EF_F32_VECTORS 2
#define EF_HALF_VECTORS 2
#define EF_GROUP_SIZES {4, 3, 3, 2}

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
/* Loads that fill both halves of a register, and one shuffle within them: widening moves work across them. */
#define EF_NONE (char)0x80
#define EF_HIGH_WORD(i) EF_NONE, EF_NONE, i, i + 1
EF_PRIM EF(V) EF(vload_bf16)(const void *p)
{
    const __m256i places =
        _mm256_setr_epi8(EF_HIGH_WORD(0), EF_HIGH_WORD(2), EF_HIGH_WORD(4), EF_HIGH_WORD(6),
                         EF_HIGH_WORD(8), EF_HIGH_WORD(10), EF_HIGH_WORD(12), EF_HIGH_WORD(14));
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, places));
}
#define EF_HIGH_BYTE(i) EF_NONE, EF_NONE, EF_NONE, i
EF_PRIM EF(V) EF(vload_i8)(const void *p)
{
    const __m256i places =
        _mm256_setr_epi8(EF_HIGH_BYTE(0), EF_HIGH_BYTE(1), EF_HIGH_BYTE(2), EF_HIGH_BYTE(3),
                         EF_HIGH_BYTE(4), EF_HIGH_BYTE(5), EF_HIGH_BYTE(6), EF_HIGH_BYTE(7));
    int64_t q;
    memcpy(&q, p, 8);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x(q), places), 24));
}
#undef EF_NONE
#undef EF_HIGH_WORD
#undef EF_HIGH_BYTE

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
/* Widening from memory spares two shuffles a vector. */
EF_PRIM EF(N) EF(nadd_at)(EF(N) n, const void *p)
{
    return EF(nadd_halves)(n, _mm_loadu_ps((const float *)p), _mm_loadu_ps((const float *)p + 4));
}
/* Halves are squared in float32, which is exact unless it over- or underflows, and the squares, which have
 * no sign, widened by moving their bits: exponent and fraction are then a double's, 2^896 too small. That
 * takes neither of the units that conversions and products wait for. Lanes 0, 2, 4, 6 are l[0] here. */
EF_PRIM EF(N) EF(nadd_half)(EF(N) n, EF(V) v)
{
    const __m256i square = _mm256_castps_si256(_mm256_mul_ps(v, v));
    const __m256i odd = _mm256_and_si256(square, _mm256_set1_epi64x(-(1ll << 32)));
    const __m256i even = _mm256_mul_epu32(square, _mm256_set1_epi64x(1 << 29));
    return (EF(N)){{_mm256_add_pd(n.l[0], _mm256_castsi256_pd(even)),
                    _mm256_add_pd(n.l[1], _mm256_castsi256_pd(_mm256_srli_epi64(odd, 3)))}};
}
/* The lanes; 0 if one is so large that a square may have been infinite or NaN, which the bits do not show. */
EF_PRIM int EF(nlanes_half)(double *lanes, EF(N) n)
{
    double l[8];
    int sure = 1;
    _mm256_storeu_pd(l, n.l[0]);
    _mm256_storeu_pd(l + 4, n.l[1]);
    for (int i = 0; i < 8; i++) {
        lanes[i] = l[i % 2 * 4 + i / 2] * 0x1p896;
        sure &= lanes[i] < 0x1p120;
    }
    return sure;
}
/* Whether a square of bfloat16 was rounded since `watch`: the flags of overflow and underflow stay set. */
EF_PRIM void EF(watch)(void) { _mm_setcsr(0x1f80); }
EF_PRIM int EF(rounded)(void) { return (_mm_getcsr() & (_MM_EXCEPT_OVERFLOW | _MM_EXCEPT_UNDERFLOW)) != 0; }
EF_PRIM void EF(nlanes)(double *lanes, EF(N) n)
{
    _mm256_storeu_pd(lanes, n.l[0]);
    _mm256_storeu_pd(lanes + 4, n.l[1]);
}

/* Squares of 32 int8 added up as integers: at most a scale block's 256 x 128^2 in a lane. */
EF_PRIM EF(I) EF(izero)(void) { return _mm256_setzero_si256(); }
EF_PRIM EF(I) EF(iadd)(EF(I) sum, const void *p)
{
    const __m256i q = _mm256_loadu_si256((const __m256i *)p), x = _mm256_srai_epi16(q, 8);
    const __m256i y = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8);
    return _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_madd_epi16(x, x)), _mm256_madd_epi16(y, y));
}
EF_PRIM int32_t EF(isum)(EF(I) sum)
{
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
