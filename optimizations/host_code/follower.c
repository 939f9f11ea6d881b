/* Leads kernels and copies of an executable graph to where inputs lie. */

typedef int (*SetKernel)(void *executable, void *node, const void *parameters);
typedef struct { Py_ssize_t index, first, end; uint64_t below_alignment, size; } Followed;
typedef struct { uint64_t where; int64_t delta; Py_ssize_t update; } Cell;
/* `function` sets the node of a kernel, or of a copy, which has a context. That of a kernel is 0. */
typedef struct { uint64_t function, node, parameters, context; int concerned; } Update;
typedef struct {
    HEAD Py_ssize_t inputs_count, updates_count, borders_count; Followed *inputs; Cell *cells; Update *updates;
    uint64_t *borders, executable;
} Follower;

/* How many borders are below an address, or at it where `inclusive`. They ascend. */
static Py_ssize_t below(const Follower *self, uint64_t address, int inclusive) {
    Py_ssize_t low = 0, high = self->borders_count;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        uint64_t border = self->borders[middle];
        if (border < address || (inclusive && border == address)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int is_readable(const Follower *self, const Followed *one, uint64_t address) {
    Py_ssize_t begin = below(self, address, 1);
    return !(address & one->below_alignment) && !(begin & 1) && below(self, address + one->size, 0) == begin;
}

/* The number of a list. -1 with an error where there is none. */
static int number_at(PyObject *list, Py_ssize_t index, uint64_t *number) {
    if (index >= PyList_GET_SIZE(list)) {
        PyErr_SetString(PyExc_IndexError, "fewer addresses than inputs");
        return -1;
    }
    *number = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, index));
    return PyErr_Occurred() ? -1 : 0;
}

/* Where an input is read from now on, in the caller's list; 0 while that is not known. */
static int note(PyObject *now, Py_ssize_t index, uint64_t address) {
    PyObject *number = PyLong_FromUnsignedLongLong(address);
    return number ? PyList_SetItem(now, index, number) : -1;
}

/* The driver's code, which is 0 where it has set the parameters of a node. */
static int update(const Follower *self, const Update *one) {
    void *executable = (void *)(uintptr_t)self->executable, *node = (void *)(uintptr_t)one->node;
    const void *parameters = (const void *)(uintptr_t)one->parameters;
    if (!one->context) return ((SetKernel)(uintptr_t)one->function)(executable, node, parameters);
    return ((SetCopy)(uintptr_t)one->function)(executable, node, parameters, (void *)(uintptr_t)one->context);
}

/* follower(addresses, now): both are lists by index. It gives how many bytes were set; -1, and nothing was done, where
   one cannot be read where it lies. `now` has what is set then. Where the driver fails, it raises the call's name and
   its code. */
static PyObject *follower_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    Follower *self = (Follower *)object;
    if (PyVectorcall_NARGS(count) != 2 || names || !PyList_Check(args[0]) || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "it is called with a list of addresses and one of those that are set");
        return NULL;
    }
    Py_ssize_t cells_set = 0;
    uint64_t address, set;
    for (const Followed *one = self->inputs; one < self->inputs + self->inputs_count; one++) {
        if (number_at(args[0], one->index, &address) < 0 || number_at(args[1], one->index, &set) < 0) return NULL;
        if (address != set && !is_readable(self, one, address)) return PyLong_FromLong(-1);
    }
    for (const Followed *one = self->inputs; one < self->inputs + self->inputs_count; one++) {
        if (number_at(args[0], one->index, &address) < 0 || number_at(args[1], one->index, &set) < 0) return NULL;
        if (address == set) continue;
        if (note(args[1], one->index, 0) < 0) return NULL;
        for (Cell *cell = self->cells + one->first; cell < self->cells + one->end; cell++, cells_set++) {
            uint64_t value = address + (uint64_t)cell->delta;
            memcpy((void *)(uintptr_t)cell->where, &value, sizeof value);
            self->updates[cell->update].concerned = 1;
        }
    }
    if (!cells_set) return PyLong_FromLong(0);
    int code = 0;
    const char *failed = NULL;
    for (Update *one = self->updates; one < self->updates + self->updates_count; one++) {
        if (!one->concerned) continue;
        one->concerned = 0;
        if (!code && (code = update(self, one)))
            failed = one->context ? "cuGraphExecMemcpyNodeSetParams" : "cuGraphExecKernelNodeSetParams";
    }
    if (code) {
        PyObject *error = Py_BuildValue("si", failed, code);
        if (error) PyErr_SetObject(PyExc_RuntimeError, error);
        Py_XDECREF(error);
        return NULL;
    }
    for (const Followed *one = self->inputs; one < self->inputs + self->inputs_count; one++) {
        if (number_at(args[0], one->index, &address) < 0 || note(args[1], one->index, address) < 0) return NULL;
    }
    return PyLong_FromSsize_t(cells_set * (Py_ssize_t)sizeof(uint64_t));
}

static void follower_free(PyObject *object) {
    Follower *self = (Follower *)object;
    PyObject_GC_UnTrack(object);
    Py_CLEAR(self->held);
    PyMem_Free(self->inputs);
    PyMem_Free(self->cells);
    PyMem_Free(self->updates);
    PyMem_Free(self->borders);
    Py_TYPE(object)->tp_free(object);
}

/* A copy of the bytes, with room for one more. NULL with an error where there is no memory. */
static void *copy_of(PyObject *bytes) {
    size_t size = (size_t)PyBytes_GET_SIZE(bytes);
    void *copy = PyMem_Calloc(1, size + sizeof(Followed));
    if (!copy) return PyErr_NoMemory();
    memcpy(copy, PyBytes_AS_STRING(bytes), size);
    return copy;
}

/* Follower(held, executable, inputs, cells, updates, borders): the last four are bytes of 64 bits each. Of an input its
   index, its first cell and the one behind its last, bits that its address must not have, and its size; of a cell where
   it is, what is added to the address, and its update; of an update the driver's function that sets the parameters of a
   kernel, or of a copy, in an executable graph, the node, its parameters, and the context of a copy. Between each two
   borders lies memory that the graph writes. */
static PyObject *follower_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *held, *inputs, *cells, *updates, *borders;
    unsigned long long executable;
    if (!PyArg_ParseTuple(args, "OKSSSS", &held, &executable, &inputs, &cells, &updates, &borders)) return NULL;
    Follower *self = (Follower *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = follower_call;
    self->executable = executable;
    Py_INCREF(held);
    self->held = held;
    const uint64_t *numbers;
    Py_ssize_t cells_count = numbers_of(cells, &numbers, 3);
    self->inputs_count = numbers_of(inputs, &numbers, 5);
    self->borders_count = numbers_of(borders, &numbers, 1);
    self->updates_count = numbers_of(updates, &numbers, 4);
    if (cells_count < 0 || self->inputs_count < 0 || self->borders_count < 0 || self->updates_count < 0) goto failed;
    if (!(self->inputs = copy_of(inputs)) || !(self->cells = copy_of(cells)) || !(self->borders = copy_of(borders)))
        goto failed;
    if (!(self->updates = PyMem_Calloc((size_t)self->updates_count + 1, sizeof(Update)))) {
        PyErr_NoMemory();
        goto failed;
    }
    int fits = 1;
    for (Py_ssize_t index = 0; index < self->updates_count; index++, numbers += 4) {
        self->updates[index] = (Update){numbers[0], numbers[1], numbers[2], numbers[3], 0};
        fits &= numbers[0] != 0;
    }
    for (Py_ssize_t index = 0; index < self->inputs_count; index++) {
        Followed one = self->inputs[index];
        fits &= one.index >= 0 && 0 <= one.first && one.first <= one.end && one.end <= cells_count;
    }
    for (Py_ssize_t index = 0; index < cells_count; index++)
        fits &= 0 <= self->cells[index].update && self->cells[index].update < self->updates_count;
    if (fits) return (PyObject *)self;
    PyErr_SetString(PyExc_ValueError, "inputs have cells, cells have updates, and these a function");
failed:
    Py_DECREF(self);
    return NULL;
}
