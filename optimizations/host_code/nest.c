/* The tensors of a call whose arguments are nested like those of another. */

enum { TENSOR, SEQUENCE, DICT, VALUE, ASKED, ATTRIBUTES };

/* 1 and the tensors of a value in a list, 0 if it is nested otherwise, -1 with an error. */
static int taken(PyObject *node, PyObject *value, PyObject *found) {
    switch (PyLong_AsLong(PyTuple_GET_ITEM(node, 0))) {
    case TENSOR:
        return PyList_Append(found, value) < 0 ? -1 : 1;
    case SEQUENCE: {
        PyObject *members = PyTuple_GET_ITEM(node, 2);
        Py_ssize_t size = PyTuple_GET_SIZE(members);
        if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(node, 1)) return 0;
        int is_list = PyList_CheckExact(value);
        for (Py_ssize_t index = 0; index < size; index++) { /* what is asked may be Python, and change a list */
            if (Py_SIZE(value) != size) return 0;
            PyObject *one = is_list ? PyList_GET_ITEM(value, index) : PyTuple_GET_ITEM(value, index);
            Py_INCREF(one);
            int fits = taken(PyTuple_GET_ITEM(members, index), one, found);
            Py_DECREF(one);
            if (fits <= 0) return fits;
        }
        return Py_SIZE(value) == size;
    }
    case DICT: {
        PyObject *keys = PyTuple_GET_ITEM(node, 1), *members = PyTuple_GET_ITEM(node, 2), *key, *one;
        Py_ssize_t size = PyTuple_GET_SIZE(keys), place = 0, index = 0;
        if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) != size) return 0;
        while (index < size && PyDict_Next(value, &place, &key, &one)) {
            PyObject *wanted = PyTuple_GET_ITEM(keys, index);
            if (key != wanted && (!PyUnicode_CheckExact(key) || PyUnicode_Compare(key, wanted))) return 0;
            Py_INCREF(one);
            int fits = taken(PyTuple_GET_ITEM(members, index++), one, found);
            Py_DECREF(one);
            if (fits <= 0) return fits;
        }
        return index == size;
    }
    case ATTRIBUTES: {
        PyObject *keys = PyTuple_GET_ITEM(node, 2), *members = PyTuple_GET_ITEM(node, 3);
        if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(node, 1)) return 0;
        for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(keys); index++) {
            PyObject *one = PyObject_GetAttr(value, PyTuple_GET_ITEM(keys, index));
            int fits = one ? taken(PyTuple_GET_ITEM(members, index), one, found) : -1;
            Py_XDECREF(one);
            if (fits <= 0) return fits;
        }
        return 1;
    }
    case VALUE: {
        PyObject *wanted = PyTuple_GET_ITEM(node, 1);
        if (value == wanted) return 1;
        return Py_TYPE(value) == Py_TYPE(wanted) ? PyObject_RichCompareBool(value, wanted, Py_EQ) : 0;
    }
    default: {
        PyObject *fits = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(node, 1), value, found, NULL);
        int is_so = fits ? PyObject_IsTrue(fits) : -1;
        Py_XDECREF(fits);
        return is_so;
    }
    }
}

/* nest(args, kwargs): a list of the tensors, None where they are nested otherwise. */
static PyObject *nest_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) != 2 || names) {
        PyErr_SetString(PyExc_TypeError, "it is called with the positional and the named arguments of a call");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    if (!found) return NULL;
    for (int index = 0; index < 2; index++) {
        int fits = taken(PyTuple_GET_ITEM(((Holder *)self)->held, index), args[index], found);
        if (fits > 0) continue;
        Py_DECREF(found);
        if (fits < 0) return NULL;
        Py_RETURN_NONE;
    }
    return found;
}

/* Whether a tuple says of each place in a nest what has to stand there, as `taken` reads it. */
static int is_nest(PyObject *node) {
    if (!PyTuple_CheckExact(node) || !PyTuple_GET_SIZE(node) || !PyLong_CheckExact(PyTuple_GET_ITEM(node, 0))) return 0;
    long kind = PyLong_AsLong(PyTuple_GET_ITEM(node, 0));
    if (kind == TENSOR) return PyTuple_GET_SIZE(node) == 1;
    if (kind == VALUE || kind == ASKED) return PyTuple_GET_SIZE(node) == 2;
    if (kind != SEQUENCE && kind != DICT && kind != ATTRIBUTES) return 0;
    if (PyTuple_GET_SIZE(node) != (kind == ATTRIBUTES ? 4 : 3)) return 0;
    PyObject *first = PyTuple_GET_ITEM(node, 1), *members = PyTuple_GET_ITEM(node, kind == ATTRIBUTES ? 3 : 2);
    PyObject *keys = kind == ATTRIBUTES ? PyTuple_GET_ITEM(node, 2) : kind == DICT ? first : NULL;
    if (!PyTuple_CheckExact(members)) return 0;
    if (kind == SEQUENCE && first != (PyObject *)&PyTuple_Type && first != (PyObject *)&PyList_Type) return 0;
    if (keys && (!PyTuple_CheckExact(keys) || PyTuple_GET_SIZE(keys) != PyTuple_GET_SIZE(members))) return 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(members); index++) {
        if (keys && !PyUnicode_CheckExact(PyTuple_GET_ITEM(keys, index))) return 0;
        if (!is_nest(PyTuple_GET_ITEM(members, index))) return 0;
    }
    return 1;
}

/* Nest(args, kwargs): (TENSOR,), (SEQUENCE, list or tuple, members), (DICT, keys, members) of an exact dict,
   (VALUE, value), (ATTRIBUTES, class, names, members), or (ASKED, function of a value and a list, which appends its
   tensors and says whether it fits). */
static PyObject *nest_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *positional, *named;
    if (!no_names(names) || !PyArg_ParseTuple(args, "OO", &positional, &named)) return NULL;
    if (!is_nest(positional) || !is_nest(named)) {
        PyErr_SetString(PyExc_TypeError, "what stands in each place of the arguments, as tuples");
        return NULL;
    }
    return holder_of_two(type, nest_call, positional, named);
}
