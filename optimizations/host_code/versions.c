/* Counts up the versions of tensors. */

typedef struct { HEAD Py_ssize_t part, counter, version; } Versions;

#define SOON 16 /* Tensors whose counts are asked for before they are needed: each count waits for the one before. */

/* Where the counter of a tensor is, 0 if it has none. */
static uint64_t counter_of(const Versions *self, Py_ssize_t index) {
    uint64_t tensor = (uint64_t)(uintptr_t)PyTuple_GET_ITEM(self->held, index);
    uint64_t part = word_at(tensor + (uint64_t)self->part);
    return part ? word_at(part + (uint64_t)self->counter) : 0;
}

static void soon(const Versions *self, uint64_t counter) {
    if (counter) __builtin_prefetch((const void *)(uintptr_t)(counter + (uint64_t)self->version), 1);
}

static PyObject *versions_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) || names) return no_arguments();
    Versions *self = (Versions *)object;
    Py_ssize_t size = PyTuple_GET_SIZE(self->held);
    for (Py_ssize_t index = 0; index < size && index < SOON; index++) soon(self, counter_of(self, index));
    for (Py_ssize_t index = 0; index < size; index++) {
        if (index + SOON < size) soon(self, counter_of(self, index + SOON));
        uint64_t counter = counter_of(self, index);
        if (counter) __atomic_fetch_add((uint32_t *)(uintptr_t)(counter + (uint64_t)self->version), 1, __ATOMIC_SEQ_CST);
    }
    Py_RETURN_NONE;
}

/* Versions(tensors, part, counter, version): where an object has its part in C++, that its counter, and that its count.
   What has no counter counts none. */
static PyObject *versions_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *tensors;
    Py_ssize_t part, counter, version;
    if (!no_names(names) || !PyArg_ParseTuple(args, "O!nnn", &PyTuple_Type, &tensors, &part, &counter, &version))
        return NULL;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tensors); index++)
        if (!has_word((PyObject *)Py_TYPE(PyTuple_GET_ITEM(tensors, index)), part)) return NULL;
    Versions *self = (Versions *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = versions_call;
    self->part = part, self->counter = counter, self->version = version;
    Py_INCREF(tensors);
    self->held = tensors;
    return (PyObject *)self;
}
