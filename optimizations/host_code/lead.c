/* Leads one copy of an executable graph to another address. */

typedef int (*SetCopy)(void *executable, void *node, const void *parameters, void *context);
typedef struct { HEAD SetCopy set; uint64_t executable, node, parameters, context, place; PyObject *error; } Lead;

/* lead(address): from the next launch on. Where the driver fails, it raises what it was made with. */
static PyObject *lead_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    Lead *self = (Lead *)object;
    if (PyVectorcall_NARGS(count) != 1 || names) {
        PyErr_SetString(PyExc_TypeError, "it is called with an address");
        return NULL;
    }
    uint64_t address = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    memcpy((void *)(uintptr_t)self->place, &address, sizeof address);
    int code = self->set((void *)(uintptr_t)self->executable, (void *)(uintptr_t)self->node,
                         (const void *)(uintptr_t)self->parameters, (void *)(uintptr_t)self->context);
    if (code) return PyErr_Format(self->error, "cuGraphExecMemcpyNodeSetParams failed: %d", code);
    Py_RETURN_NONE;
}

static void lead_free(PyObject *object) {
    PyObject_GC_UnTrack(object);
    Py_CLEAR(((Lead *)object)->held);
    Py_CLEAR(((Lead *)object)->error);
    Py_TYPE(object)->tp_free(object);
}

/* Lead(held, error, function, executable, node, parameters, context, place): the driver's function that sets the
   parameters of a copy in an executable graph, where these are, and where the address is among them. */
static PyObject *lead_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *held, *error;
    unsigned long long function, executable, node, parameters, context, place;
    if (!no_names(names) || !PyArg_ParseTuple(args, "OOKKKKKK", &held, &error, &function, &executable, &node,
                                              &parameters, &context, &place))
        return NULL;
    if (!PyExceptionClass_Check(error) || !function || place < parameters) {
        PyErr_SetString(PyExc_ValueError, "a class of errors, a function, and a place among the parameters");
        return NULL;
    }
    Lead *self = (Lead *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = lead_call;
    self->held = Py_NewRef(held), self->error = Py_NewRef(error);
    self->set = (SetCopy)(uintptr_t)function;
    self->executable = executable, self->node = node, self->parameters = parameters;
    self->context = context, self->place = place;
    return (PyObject *)self;
}
