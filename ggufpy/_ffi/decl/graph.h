/* ggml.h: graphs. */

struct ggml_tensor * ggml_build_forward_select(struct ggml_cgraph * cgraph, struct ggml_tensor ** tensors,
    int n_tensors, int idx);
void ggml_build_forward_expand(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
void ggml_build_forward_order(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
struct ggml_cgraph * ggml_new_graph(struct ggml_context * ctx);
struct ggml_cgraph * ggml_new_graph_custom(struct ggml_context * ctx, size_t size, bool grads);
struct ggml_cgraph * ggml_graph_dup(struct ggml_context * ctx, struct ggml_cgraph * cgraph, bool force_grads);
void ggml_graph_cpy(struct ggml_cgraph * src, struct ggml_cgraph * dst);
void ggml_graph_clear(struct ggml_cgraph * cgraph);
int ggml_graph_size(struct ggml_cgraph * cgraph);
struct ggml_tensor * ggml_graph_node(struct ggml_cgraph * cgraph, int i);
struct ggml_tensor ** ggml_graph_nodes(struct ggml_cgraph * cgraph);
int ggml_graph_n_nodes(struct ggml_cgraph * cgraph);
void ggml_graph_add_node(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
size_t ggml_graph_overhead(void);
size_t ggml_graph_overhead_custom(size_t size, bool grads);
struct ggml_tensor * ggml_graph_get_tensor(const struct ggml_cgraph * cgraph, const char * name);
void ggml_graph_print(const struct ggml_cgraph * cgraph);
void ggml_graph_dump_dot(const struct ggml_cgraph * gb, const struct ggml_cgraph * cgraph, const char * filename);
