static inline __attribute__((always_inline)) VEC FMHA_NAME(activate)(const int kind, VEC x)
{
    return kind == FMHA_RELU ? v_max(x, v_splat(0)) : x;
}
