/* The inner loops of sampling (sampling.c). */
enum { GGUFPY_FEW = 1024 };
void ggufpy_largest(const float * values, int64_t n, int64_t k, int64_t * places);
void ggufpy_divide(const float * logits, int64_t n, float peak, float divisor, float * result);
float ggufpy_sum(const float * values, int64_t n);
void ggufpy_logarithms(const float * values, int64_t n, float * result);
void ggufpy_binary_logarithms(const float * values, int64_t n, float * result);
float ggufpy_power(float base, float exponent);
float ggufpy_deviation(const float * logits, int64_t n);
void ggufpy_softmax(const float * logits, int64_t n, float peak, float * result);
int64_t ggufpy_reach(const float * shares, int64_t n, float enough, bool exceed);
float ggufpy_floor(float peak, float share);
int64_t ggufpy_at_least(const float * logits, int64_t n, float peak, float share);
int64_t ggufpy_draw(const float * logits, int64_t n, float peak, double u, float * weights);
int64_t ggufpy_draw_likeliest(const float * row, int64_t n, int64_t k, float top_p, float min_p, float temperature,
                              double u);
bool ggufpy_argmax(ggml_backend_t cpu, const float ** values, int64_t n, int64_t size, int64_t * places);
