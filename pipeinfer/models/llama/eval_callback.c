/* libllama's evaluation callback in C: computes what on_node in eval_callback.py computes, without running Python for
 * every node of a graph. Knows no struct of libggml: it gets names and data through libggml's functions. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* The same as Tap in eval_callback.py. */
struct tap {
    const char *name;
    char *out;
    size_t n_out;
};

/* The same as State in eval_callback.py, which describes the fields. */
struct state {
    const char *(*name_of)(const void *tensor);
    void (*get)(const void *tensor, void *data, size_t offset, size_t n_bytes);
    void (*set)(void *tensor, const void *data, size_t offset, size_t n_bytes);
    bool (*stop)(void);
    const char *layer, *last, *input;
    char *out;
    const char *hidden;
    size_t n_out, n_hidden, n_at_once;
    int64_t interval_ns, began_ns, n_layers, due;
    struct tap *taps;
    size_t n_taps;
    bool between, stopped;
};

const size_t state_bytes = sizeof(struct state);
const char source[] = SOURCE;

static bool is(const char *name, const char *wanted) { return wanted && strcmp(name, wanted) == 0; }

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Layers until `stop` is asked again: those that take about `interval_ns`. */
static int64_t step(const struct state *s) {
    const int64_t n_layers = s->interval_ns * s->n_layers / (now_ns() - s->began_ns + 1);
    return n_layers > 1 ? n_layers : 1;
}

static void copy_out(const struct state *s, const void *tensor, char **out, size_t *n_out) {
    const size_t n_bytes = smaller(s->n_at_once, *n_out);
    s->get(tensor, *out, 0, n_bytes);
    *out += n_bytes;
    *n_out -= n_bytes;
}

static struct tap *tap_of(const struct state *s, const char *name) {
    for (size_t i = 0; i < s->n_taps; ++i)
        if (is(name, s->taps[i].name))
            return s->taps + i;
    return NULL;
}

bool on_node(void *tensor, bool ask, struct state *s) {
    const char *name = s->name_of(tensor);
    struct tap *const tap = tap_of(s, name);
    if (ask) {
        if (s->stopped || is(name, s->last) || is(name, s->input))
            return true;
        if (!s->between || strncmp(name, s->layer, strlen(s->layer)) != 0)
            return tap != NULL;
        if (s->n_layers == 0)
            s->began_ns = now_ns();
        return ++s->n_layers == s->due || tap != NULL;
    }
    if (tap && !s->stopped)
        copy_out(s, tensor, &tap->out, &tap->n_out);
    if (is(name, s->input)) {
        const size_t n_bytes = smaller(s->n_at_once, s->n_hidden);
        s->set(tensor, s->hidden, 0, n_bytes);
        s->hidden += n_bytes;
        s->n_hidden -= n_bytes;
        return true;
    }
    if (is(name, s->last)) {
        copy_out(s, tensor, &s->out, &s->n_out);
        return false;
    }
    if (!s->stopped && s->between && s->n_layers == s->due) {
        s->stopped = s->stop();
        s->due = s->n_layers + step(s);
    }
    return !s->stopped;
}
