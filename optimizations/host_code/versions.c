/* Counts up the versions of tensors. */

typedef struct { HEAD Py_ssize_t part, counter, version; } Versions;

static PyObject *versions_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) || names) return no_arguments();
    Versions *self = (Versions *)object;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->held); index++) {
        uint64_t tensor = (uint64_t)(uintptr_t)PyTuple_GET_ITEM(self->held, index);
        uint64_t part = word_at(tensor + (uint64_t)self->part);
        uint64_t counter = part ? word_at(part + (uint64_t)self->counter) : 0;
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
