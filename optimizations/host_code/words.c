/* Whether words of memory, or halves of such, are what they should be, stage by stage. */

#define AHEAD 24 /* Entries of a table that are asked for before they are needed. */

/* So many words, or one half if `count` is 0, beginning at an address. Their values follow each other. */
typedef struct { uint64_t address; uint64_t count; } Run;
typedef struct { HEAD Py_ssize_t runs_count, values_count; Run *runs; uint64_t *values; } Words;

static int words_hold(const Words *self) {
    if (!self->held) return 0;
    const uint64_t *wanted = self->values;
    const Run *end = self->runs + self->runs_count;
    for (const Run *run = self->runs; run < end; run++) {
        if (run + AHEAD < end) __builtin_prefetch((const void *)(uintptr_t)run[AHEAD].address);
        if (run->count == 0) {
            uint32_t half;
            memcpy(&half, (const void *)(uintptr_t)run->address, sizeof half);
            if (half != (uint32_t)*wanted++) return 0;
            continue;
        }
        uint64_t differs = 0;
        for (uint64_t index = 0; index < run->count; index++, wanted++)
            differs |= word_at(run->address + index * sizeof(uint64_t)) ^ *wanted;
        if (differs) return 0;
    }
    return 1;
}

/* Room for so many words more. -1 with an error where there is none. */
static int words_grow(Words *self, Py_ssize_t more) {
    Run *runs = PyMem_Realloc(self->runs, (size_t)(self->runs_count + more + 1) * sizeof *runs);
    if (runs) self->runs = runs;
    uint64_t *values = PyMem_Realloc(self->values, (size_t)(self->values_count + more + 1) * sizeof *values);
    if (values) self->values = values;
    if (runs && values) return 0;
    PyErr_NoMemory();
    return -1;
}

static PyObject *words_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) || names) return no_arguments();
    return PyBool_FromLong(words_hold((Words *)self));
}

/* Words(held, ((addresses, values, size), ...)): bytes of 64 bits each, and how many bytes of each word count. */
static PyObject *words_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *held, *stages;
    if (!no_names(names) || !PyArg_ParseTuple(args, "OO!", &held, &PyTuple_Type, &stages)) return NULL;
    if (!are_tuples(stages)) return NULL;
    Words *self = (Words *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = words_call;
    Py_INCREF(held);
    self->held = held;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(stages); index++) {
        PyObject *addresses, *values;
        const uint64_t *where, *what;
        int size;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(stages, index), "SSi", &addresses, &values, &size)) goto failed;
        Py_ssize_t count = numbers_of(addresses, &where, 1), values_count = numbers_of(values, &what, 1);
        if (count < 0 || values_count < 0) goto failed;
        if (values_count != count || (size != 4 && size != 8)) {
            PyErr_SetString(PyExc_ValueError, "as many values as addresses, of 4 or 8 bytes");
            goto failed;
        }
        if (words_grow(self, count) < 0) goto failed;
        for (Py_ssize_t one = 0; one < count; one++) {
            Run *last = self->runs + self->runs_count - 1;
            int follows = one && size == 8 && last->address + last->count * sizeof(uint64_t) == where[one];
            if (follows) last->count++;
            else self->runs[self->runs_count++] = (Run){where[one], size == 8};
            self->values[self->values_count++] = what[one];
        }
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int words_clear(PyObject *self) {
    ((Words *)self)->runs_count = 0; /* nothing is read any more of what may be gone */
    Py_CLEAR(((Words *)self)->held);
    return 0;
}

static void words_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    words_clear(self);
    PyMem_Free(((Words *)self)->runs);
    PyMem_Free(((Words *)self)->values);
    Py_TYPE(self)->tp_free(self);
}
