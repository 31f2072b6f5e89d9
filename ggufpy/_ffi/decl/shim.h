/* shim.c: what ggml has no plain function for. */

/* Loading. */
void * ggufpy_dlopen(const char * path);
const char * ggufpy_dlerror(void);
int ggufpy_backend_score(const char * path);
void ggufpy_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]);
uint64_t ggufpy_xcr0(void);
const char * ggufpy_build_record(void);

/* What a backend offers through its registry only. A bool says whether it does. */
bool ggufpy_backend_set_n_threads(ggml_backend_t backend, int n_threads);
bool ggufpy_backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data);
bool ggufpy_backend_set_use_ref(ggml_backend_t backend, bool use_ref);
bool ggufpy_backend_set_threadpool(ggml_backend_t backend, ggml_threadpool_t pool);
ggml_threadpool_t ggufpy_threadpool_new(ggml_backend_dev_t device, struct ggml_threadpool_params * params);
bool ggufpy_threadpool_free(ggml_backend_dev_t device, ggml_threadpool_t pool);
ggml_backend_buffer_type_t * ggufpy_dev_extra_bufts(ggml_backend_dev_t device);
struct ggml_backend_feature * ggufpy_reg_features(ggml_backend_reg_t reg);

/* Tensors and graphs. */
void ggufpy_describe(const struct ggml_tensor * t, int64_t * out);
struct ggml_tensor * ggufpy_graph_first_unsupported(struct ggml_cgraph * graph, ggml_backend_t * backends, int n);
int ggufpy_graph_max_holes(struct ggml_cgraph * graph, const void * memory, int n);
bool ggufpy_expand(struct ggml_cgraph * graph, struct ggml_tensor * tensor);
int ggufpy_first_bad_row(struct ggml_tensor ** tensors, const int64_t * limits, int n, int64_t * bad);
void ggufpy_write_mask(void * mask, bool f16, const int32_t * cells, const bool * has, int64_t n_cells,
                       const int32_t * positions, int64_t n, int64_t before, int64_t after, int64_t chunk, bool alibi);

/* Callbacks. */
bool ggufpy_stop(void * data);
void ggufpy_log_discard(enum ggml_log_level level, const char * text, void * user_data);
extern "Python" void ggufpy_log(enum ggml_log_level level, const char * text, void * user_data);
