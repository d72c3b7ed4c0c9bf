/* Vectors of 8 floats with the compiler's vector extensions: SSE2 on x86-64, NEON on AArch64. */
#define EF(name) name##_generic
#define EF_ISA_NAME "generic"
#define EF_TARGET
#define EF_W 8
#define EF_F32_VECTORS 2
#define EF_HALF_VECTORS 2
#define EF_GROUP_SIZES {2, 2, 2, 2}

typedef float EF(v4f) __attribute__((vector_size(16)));
typedef float EF(v2f) __attribute__((vector_size(8)));
typedef double EF(v2d) __attribute__((vector_size(16)));
typedef uint16_t EF(v4h) __attribute__((vector_size(8)));
typedef uint32_t EF(v4u) __attribute__((vector_size(16)));
typedef int16_t EF(v8i) __attribute__((vector_size(16)));
typedef int8_t EF(v8c) __attribute__((vector_size(8)));
typedef int32_t EF(v4i) __attribute__((vector_size(16)));
typedef struct { EF(v4f) a, b; } EF(V);
typedef struct { EF(v2d) l[4]; } EF(N);
typedef uint64_t EF(U) __attribute__((vector_size(16)));

EF_PRIM EF(V) EF(vset)(float x) { return (EF(V)){{x, x, x, x}, {x, x, x, x}}; }
EF_PRIM EF(V) EF(vload)(const void *p) { EF(V) v; memcpy(&v, p, 32); return v; }
EF_PRIM void EF(vstore)(float *p, EF(V) v) { memcpy(p, &v, 32); }
EF_PRIM EF(V) EF(vmul)(EF(V) x, EF(V) y) { return (EF(V)){x.a * y.a, x.b * y.b}; }
EF_PRIM EF(V) EF(vadd)(EF(V) x, EF(V) y) { return (EF(V)){x.a + y.a, x.b + y.b}; }
EF_PRIM EF(V) EF(vsub)(EF(V) x, EF(V) y) { return (EF(V)){x.a - y.a, x.b - y.b}; }
EF_PRIM EF(V) EF(vdiv)(EF(V) x, EF(V) y) { return (EF(V)){x.a / y.a, x.b / y.b}; }
EF_PRIM EF(v4f) EF(chosen)(EF(v4f) x, EF(v4f) y, EF(v4i) first)
{
    return (EF(v4f))(((EF(v4i))x & first) | ((EF(v4i))y & ~first));
}
/* Return x < y ? x : y and x > y ? x : y for each element, as SSE's minimum and maximum do, also for NaN. */
EF_PRIM EF(V) EF(vmin)(EF(V) x, EF(V) y)
{
    return (EF(V)){EF(chosen)(x.a, y.a, (EF(v4i))(x.a < y.a)), EF(chosen)(x.b, y.b, (EF(v4i))(x.b < y.b))};
}
EF_PRIM EF(V) EF(vmax)(EF(V) x, EF(V) y)
{
    return (EF(V)){EF(chosen)(x.a, y.a, (EF(v4i))(x.a > y.a)), EF(chosen)(x.b, y.b, (EF(v4i))(x.b > y.b))};
}
EF_PRIM EF(V) EF(vsign)(EF(V) v)
{
    float x[8];
    EF(vstore)(x, v);
    for (int i = 0; i < 8; i++) x[i] = x[i] != x[i] ? x[i] : (float)((x[i] > 0) - (x[i] < 0));
    return EF(vload)(x);
}
#ifdef __SSE2__
EF_PRIM void EF(vround)(int32_t *p, EF(V) v)
{
    _mm_storeu_si128((__m128i *)p, _mm_cvtps_epi32((__m128)v.a));
    _mm_storeu_si128((__m128i *)(p + 4), _mm_cvtps_epi32((__m128)v.b));
}
EF_PRIM EF(U) EF(uproduct)(EF(U) x, EF(U) y) { return (EF(U))_mm_mul_epu32((__m128i)x, (__m128i)y); }
EF_PRIM EF(V) EF(vsqrt)(EF(V) x)
{
    return (EF(V)){(EF(v4f))_mm_sqrt_ps((__m128)x.a), (EF(v4f))_mm_sqrt_ps((__m128)x.b)};
}
EF_PRIM void EF(vstream)(float *p, EF(V) v) { _mm_stream_ps(p, (__m128)v.a); _mm_stream_ps(p + 4, (__m128)v.b); }
EF_PRIM EF(v2d) EF(low)(EF(v4f) x) { return (EF(v2d))_mm_cvtps_pd((__m128)x); }
EF_PRIM EF(v2d) EF(high)(EF(v4f) x) { return (EF(v2d))_mm_cvtps_pd(_mm_movehl_ps((__m128)x, (__m128)x)); }
/* The conversions to wider integers are written by hand, because compilers convert these vector types byte by byte. */
EF_PRIM EF(v4u) EF(widened)(const void *p)
{
    return (EF(v4u))_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)p), _mm_setzero_si128());
}
EF_PRIM EF(v8i) EF(from_i8)(const void *p)
{
    const __m128i q = _mm_loadl_epi64((const __m128i *)p);
    return (EF(v8i))_mm_srai_epi16(_mm_unpacklo_epi8(q, q), 8);
}
EF_PRIM EF(v4i) EF(low_half)(EF(v8i) x)
{
    return (EF(v4i))_mm_srai_epi32(_mm_unpacklo_epi16((__m128i)x, (__m128i)x), 16);
}
EF_PRIM EF(v4i) EF(high_half)(EF(v8i) x)
{
    return (EF(v4i))_mm_srai_epi32(_mm_unpackhi_epi16((__m128i)x, (__m128i)x), 16);
}
#else
EF_PRIM void EF(vround)(int32_t *p, EF(V) v)
{
    for (int i = 0; i < 4; i++) p[i] = (int32_t)__builtin_rintf(v.a[i]), p[i + 4] = (int32_t)__builtin_rintf(v.b[i]);
}
EF_PRIM EF(U) EF(uproduct)(EF(U) x, EF(U) y) { return (x & 0xffffffffu) * (y & 0xffffffffu); }
EF_PRIM EF(V) EF(vsqrt)(EF(V) v)
{
    float x[8];
    EF(vstore)(x, v);
    for (int i = 0; i < 8; i++) x[i] = sqrtf(x[i]);
    return EF(vload)(x);
}
EF_PRIM void EF(vstream)(float *p, EF(V) v) { EF(vstore)(p, v); }
EF_PRIM EF(v2d) EF(low)(EF(v4f) x) { return __builtin_convertvector((EF(v2f)){x[0], x[1]}, EF(v2d)); }
EF_PRIM EF(v2d) EF(high)(EF(v4f) x) { return __builtin_convertvector((EF(v2f)){x[2], x[3]}, EF(v2d)); }
EF_PRIM EF(v4u) EF(widened)(const void *p)
{
    EF(v4h) h;
    memcpy(&h, p, 8);
    return __builtin_convertvector(h, EF(v4u));
}
EF_PRIM EF(v8i) EF(from_i8)(const void *p)
{
    EF(v8c) q;
    memcpy(&q, p, 8);
    return __builtin_convertvector(q, EF(v8i));
}
EF_PRIM EF(v4i) EF(low_half)(EF(v8i) x) { return (EF(v4i)){x[0], x[1], x[2], x[3]}; }
EF_PRIM EF(v4i) EF(high_half)(EF(v8i) x) { return (EF(v4i)){x[4], x[5], x[6], x[7]}; }
#endif

/* Convert float16 to float32. If the exponent and the fraction are shifted to their positions in a float32, the value
 * is 2^112 times too small, also for denormals. An exponent of all ones (infinity, NaN) must stay all ones. */
EF_PRIM EF(v4f) EF(from_f16)(const void *p)
{
    const EF(v4u) h = EF(widened)(p);
    const EF(v4u) scaled = (EF(v4u))((EF(v4f))((h & 0x7fff) << 13) * 0x1p112f);
    return (EF(v4f))(scaled | (h & 0x8000) << 16 | ((EF(v4u))((h & 0x7c00) == 0x7c00) & 0x7f800000));
}
EF_PRIM EF(V) EF(vload_f16)(const void *p) { return (EF(V)){EF(from_f16)(p), EF(from_f16)((const char *)p + 8)}; }
/* Convert float32 to float16, rounded to nearest with ties to even. A normal result keeps 11 of the 24 bits of the
 * significand. For a denormal result, 0.5 is added, because the unit in the last place of 0.5 is float16's smallest
 * step; the result is then the fraction of the sum. */
EF_PRIM void EF(vstore_f16)(void *p, EF(V) v)
{
    uint32_t w[8];
    uint16_t h[8];
    memcpy(w, &v, 32);
    for (int i = 0; i < 8; i++) {
        const uint32_t m = w[i] & 0x7fffffff, sign = w[i] >> 16 & 0x8000;
        float shifted;
        uint32_t tiny, half;
        memcpy(&shifted, &m, 4);
        shifted += 0.5f;
        memcpy(&tiny, &shifted, 4);
        half = (m - 0x38000000 + 0xfff + (m >> 13 & 1)) >> 13;
        if (m < 0x38800000) half = tiny - 0x3f000000;
        if (m >= 0x47800000) half = 0x7c00;
        if (m > 0x7f800000) half = 0x7e00;
        h[i] = (uint16_t)(sign | half);
    }
    memcpy(p, h, 16);
}
EF_PRIM EF(V) EF(vload_bf16)(const void *p)
{
    return (EF(V)){(EF(v4f))(EF(widened)(p) << 16), (EF(v4f))(EF(widened)((const char *)p + 8) << 16)};
}
EF_PRIM EF(V) EF(vload_i8)(const void *p)
{
    const EF(v8i) q = EF(from_i8)(p);
    return (EF(V)){__builtin_convertvector(EF(low_half)(q), EF(v4f)), __builtin_convertvector(EF(high_half)(q), EF(v4f))};
}

EF_PRIM EF(N) EF(nzero)(void) { return (EF(N)){{{0, 0}, {0, 0}, {0, 0}, {0, 0}}}; }
EF_PRIM EF(N) EF(nadd)(EF(N) n, EF(V) v)
{
    EF(v2d) d0 = EF(low)(v.a), d1 = EF(high)(v.a), d2 = EF(low)(v.b), d3 = EF(high)(v.b);
    return (EF(N)){{n.l[0] + d0 * d0, n.l[1] + d1 * d1, n.l[2] + d2 * d2, n.l[3] + d3 * d3}};
}
EF_PRIM EF(N) EF(nadd_at)(EF(N) n, const void *p) { return EF(nadd)(n, EF(vload)(p)); }
EF_PRIM EF(N) EF(nadd_half)(EF(N) n, EF(V) v) { return EF(nadd)(n, v); }
EF_PRIM void EF(nstore)(double *p, EF(N) n) { memcpy(p, &n, 64); }

/* vadd_square returns sum + x^2, and vsums returns the sum of the elements of each of eight vectors. For a scale block
 * of int8, both are exact in any order, because the sum is an integer below 2^24. */
EF_PRIM EF(V) EF(vadd_square)(EF(V) sum, EF(V) x) { return EF(vadd)(sum, EF(vmul)(x, x)); }
EF_PRIM void EF(vsums)(float *sums, const EF(V) *v)
{
    for (int i = 0; i < 8; i++) {
        const EF(v4f) four = v[i].a + v[i].b;
        sums[i] = (four[0] + four[1]) + (four[2] + four[3]);
    }
}
