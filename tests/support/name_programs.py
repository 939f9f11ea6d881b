"""Small programs in which names coincide, or are asked for in unusual ways, each the source of a module.

Those of `READS` have `step(batch)`, which reads a value in its own way, and `change()`, which changes it. Those of
`COINCIDES` are whole training scripts: `graph(step)` may make a graph of it, `tell(result)` takes in what comes out.
"""

from __future__ import annotations

import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from graphs_on_cpu import CpuDevice
from step_parts import batches

from optimizations.capture.step.graphed_step import GraphedStep

CALLS = 12
CHANGES = (6, 9)

_BEGIN = """
import torch
from torch import nn
torch.manual_seed(5)
"""
_OWNER = """
class Trainer:
    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0
"""


def read(body: str, change: str) -> str:
    """A step that multiplies by what `weigh(batch)` gives."""
    after = "def step(batch):\n    return batch['x'].sum() * weigh(batch)\n"
    changed = "def change():\n" + textwrap.indent(textwrap.dedent(change), "    ") + "\n"
    return _BEGIN + textwrap.dedent(body) + after + changed


def of_global(body: str) -> str:
    return read("u = 2.0\nother = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)\n" + body, "global u; u += 1")


def of_trainer(body: str, change: str = "one.step += 1", before: str = "") -> str:
    """`weigh` of a trainer reads its `step`, next to a call of its optimizer's."""
    method = "    def weigh(self, batch):\n        self.optimizer.step()\n" + textwrap.indent(body, "        ") + "\n"
    return read(before + _OWNER + method + "one = Trainer()\ndef weigh(batch): return one.weigh(batch)\n", change)


READS: dict[str, str] = {
    # Globals.
    "plain": of_global("def weigh(batch): return u\n"),
    "globals()": of_global("def weigh(batch): return globals()['u']\n"),
    "globals() of another function": of_global("def g(): return globals()\ndef weigh(batch): return g()['u']\n"),
    "globals() under another name": of_global("g = globals\ndef weigh(batch): return g()['u']\n"),
    "a name in an object": of_global(
        "import types\nheld = types.SimpleNamespace(key='u')\ndef weigh(batch): return globals()[held.key]\n"
    ),
    "eval": of_global("def weigh(batch): return eval('u')\n"),
    "eval of more": of_global("def weigh(batch): return eval('u * 1.0 + 0')\n"),
    "eval of what is held": of_global("held = ['u * 1.0']\ndef weigh(batch): return eval(held[0])\n"),
    "eval under another name": of_global("E = eval\ndef weigh(batch): return E('u * 1.0')\n"),
    "exec": of_global(
        "def weigh(batch):\n    found = {}\n    exec('y = u * 1.0', globals(), found)\n    return found['y']\n"
    ),
    "a class body": of_global("def weigh(batch):\n    class A:\n        y = u\n    return A.y\n"),
    "a class body in a method": of_global(
        "class B:\n    def weigh(self):\n        class A:\n            u = u\n        return A.u\n"
        "def weigh(batch): return B().weigh()\n"
    ),
    "a comprehension": of_global("def weigh(batch): return sum([u for _ in range(2)])\n"),
    "a generator": of_global("def weigh(batch): return sum(u for _ in range(2))\n"),
    "an inner function": of_global("def weigh(batch):\n    def inner(): return u\n    return inner()\n"),
    "an inner function of an inner one": of_global("def weigh(batch): return (lambda: (lambda: u)())()\n"),
    "a default that calls": of_global("def late(): return u\ndef weigh(batch, f=late): return f()\n"),
    "partial": of_global(
        "import functools\nf = functools.partial(lambda k: u * k, 1.0)\ndef weigh(batch): return f()\n"
    ),
    "a function's globals": of_global("def weigh(batch): return weigh.__globals__['u']\n"),
    "a function's globals by getattr": of_global("def weigh(batch): return getattr(weigh, '__globals__')['u']\n"),
    "a module by its name": of_global("import sys\ndef weigh(batch): return sys.modules[__name__].u\n"),
    "a module by its name and vars": of_global(
        "import sys\ndef weigh(batch): return vars(sys.modules[__name__])['u']\n"
    ),
    "importlib": of_global("import importlib\ndef weigh(batch): return importlib.import_module(__name__).u\n"),
    "__import__": of_global("def weigh(batch): return __import__(__name__).u\n"),
    "a local import": of_global("def weigh(batch):\n    import program_of_names as p\n    return p.u\n"),
    "a local import of a variable": of_global(
        "def weigh(batch):\n    from program_of_names import u as y\n    return y\n"
    ),
    "a local import and getattr": of_global(
        "key = 'u'\ndef weigh(batch):\n    import program_of_names as p\n    return getattr(p, key)\n"
    ),
    "a frame": of_global("import sys\ndef weigh(batch): return sys._getframe().f_globals['u']\n"),
    "a global next to a method of the same name": read(
        "step_of = 2.0\nclass O:\n    def u(self): return 1.0\no = O()\nu = 2.0\ndef weigh(batch): return o.u() * u\n",
        "global u; u += 1",
    ),
    "a global that is absent": read(
        "def weigh(batch):\n    try: return zz\n    except NameError: return 2.0\n", "global zz; zz = 5.0"
    ),
    "a module's namespace that is held": of_global("G = globals()\ndef weigh(batch): return G['u']\n"),
    # Attributes next to a library's of the same name.
    "an alias": of_trainer("me = self\nreturn me.step"),
    "an alias under the optimizer's name": of_trainer("optimizer = self\nreturn optimizer.step"),
    "an attribute that leads back": of_trainer("return self.optimizer_.step", "one.step += 1", "").replace(
        "one = Trainer()", "one = Trainer(); one.optimizer_ = one"
    ),
    "a walrus": of_trainer("return (o := self).step"),
    "a choice": of_trainer("return (self.optimizer if not batch else self).step"),
    "or": of_trainer("return (None or self).step"),
    "getattr": of_trainer("return getattr(self, 'step')"),
    "getattr by a variable": of_trainer("k = 'step'\nreturn getattr(self, k)"),
    "getattr by a key": of_trainer("return getattr(self, {'k': 'step'}['k'])"),
    "getattr by a key elsewhere": of_trainer("return getattr(self, NAMES['k'])", before="NAMES = {'k': 'step'}\n"),
    "getattr that is kept": of_trainer("g = getattr\nprint('', end='')\nreturn g(self, KEY)", before="KEY = 'step'\n"),
    "getattr by a loop": of_trainer("for k in ('step', 'step'): found = getattr(self, k)\nreturn found"),
    "getattr in partial": of_trainer("return functools.partial(getattr, self)('step')", before="import functools\n"),
    "getattr in map": of_trainer("return list(map(lambda k: getattr(self, k), ['step']))[0]"),
    "getattr under another name": of_trainer(
        "return G(self, ''.join(['st', 'ep']) if 0 else KEY)", before="G = getattr\nKEY = 'step'\n"
    ),
    "vars": of_trainer("return vars(self)['step']"),
    "vars by a variable": of_trainer("k = 'step'\nreturn vars(self)[k]"),
    "vars under another name": of_trainer("return V(self)['step']", before="V = vars\n"),
    "__dict__": of_trainer("return self.__dict__['step']"),
    "__dict__ that is held": of_trainer("return D['step']", before="").replace(
        "one = Trainer()", "one = Trainer(); D = one.__dict__"
    ),
    "__getattribute__": of_trainer("return self.__getattribute__('step')"),
    "object.__getattribute__": of_trainer("k = 'step'\nreturn object.__getattribute__(self, k)"),
    "attrgetter": of_trainer("return operator.attrgetter('step')(self)", before="import operator\n"),
    "attrgetter of a path": of_trainer(
        "return operator.attrgetter('me.step')(self)", before="import operator\n"
    ).replace("one = Trainer()", "one = Trainer(); one.me = one"),
    "a path that is split": of_trainer(
        "found = self\nfor part in 'me.step'.split('.'): found = getattr(found, part)\nreturn found"
    ).replace("one = Trainer()", "one = Trainer(); one.me = one"),
    "asdict": read(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    w: float = 2.0\nc = C()\n"
        "def weigh(batch): return dataclasses.asdict(c)['w']\n",
        "c.w += 1",
    ),
    "asdict that is named": read(
        "from dataclasses import dataclass, asdict\n@dataclass\nclass C:\n    w: float = 2.0\nc = C()\n"
        "def weigh(batch):\n    d = asdict(c)\n    return d['w']\n",
        "c.w += 1",
    ),
    "fields": read(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    w: float = 2.0\nc = C()\n"
        "def weigh(batch): return {f.name: getattr(c, f.name) for f in dataclasses.fields(c)}['w']\n",
        "c.w += 1",
    ),
    "a class pattern": read(
        "class C: pass\nc = C(); c.w = 2.0\ndef weigh(batch):\n    match c:\n        case C(w=found): return found\n",
        "c.w += 1",
    ),
    "a class pattern by its places": read(
        "class C:\n    __match_args__ = ('w',)\nc = C(); c.w = 2.0\n"
        "def weigh(batch):\n    match c:\n        case C(found): return found\n",
        "c.w += 1",
    ),
    "a model of pydantic": read(
        "import pydantic\nclass C(pydantic.BaseModel):\n    w: float = 2.0\nc = C()\n"
        "def weigh(batch): return c.model_dump()['w']\n",
        "c.w += 1",
    ),
    "a dict of a model of pydantic": read(
        "import pydantic\nclass C(pydantic.BaseModel):\n    w: float = 2.0\nc = C()\n"
        "def weigh(batch): return dict(c)['w']\n",
        "c.w += 1",
    ),
    "subscription by getattr": read(
        "class C:\n    def __getitem__(self, k): return getattr(self, k)\nc = C(); c.w = 2.0\n"
        "def weigh(batch): return c['w']\n",
        "c.w += 1",
    ),
    "subscription by object's lookup": read(
        "class C:\n    __getitem__ = object.__getattribute__\nc = C(); c.w = 2.0\ndef weigh(batch): return c['w']\n",
        "c.w += 1",
    ),
    "a member of an enum by its name": read(
        "import enum, types\nclass E(enum.Enum):\n    A = types.SimpleNamespace(w=2.0)\n"
        "def weigh(batch): return E['A'].value.w\n",
        "E.A.value.w += 1",
    ),
    "a property": of_trainer("return self.current").replace(
        "one = Trainer()", "Trainer.current = property(lambda self: self.step)\none = Trainer()"
    ),
    "an optimizer that is a property": read(
        "class T:\n    def __init__(self): self.me = self; self.step = 2.0\n    @property\n"
        "    def optimizer(self): return self.me\n"
        "    def weigh(self): return self.optimizer.step\none = T()\ndef weigh(batch): return one.weigh()\n",
        "one.step += 1",
    ),
    "a namespace": read(
        "import types\none = types.SimpleNamespace(step=2.0)\ndef weigh(batch): return one.step\n", "one.step += 1"
    ),
    "an attribute of a tensor": read(
        "t = torch.ones(1)\nt.step = lambda: t.k\nt.k = 2.0\ndef weigh(batch): return t.step()\n", "t.k += 1"
    ),
    "a method of a tensor that is given": read(
        "t = torch.ones(1)\nt.step = lambda: 2.0\ndef weigh(batch): return t.step()\n", "t.step = lambda: 5.0"
    ),
    "a module with a method of the same name": read(
        "class M(nn.Module):\n    def __init__(self): super().__init__(); self.w = 2.0\n"
        "    def train(self, mode=True): super().train(mode); self.now = self.w; return self\n"
        "    def forward(self): return self.now if hasattr(self, 'now') else 0\n"
        "inner = M()\nmodel = nn.Sequential(inner)\n"
        "def weigh(batch):\n    model.train()\n    return inner.w + inner.now * 0\n",
        "inner.w += 1",
    ),
    "an optimizer of its own behind a scaler": read(
        "class O(torch.optim.SGD):\n    def step(self, closure=None):\n        global G\n"
        "        for p in self.param_groups[0]['params']: p.data.fill_(F['w'])\n"
        "F = {'w': 2.0}\np = nn.Parameter(torch.ones(()))\nopt = O([p], lr=0.1)\n"
        "scaler = torch.amp.GradScaler('cpu', enabled=False)\n"
        "def weigh(batch):\n    scaler.step(opt)\n    return p.detach().clone()\n",
        "F.update(w=F['w'] + 1)",
    ),
    "an optimizer that wraps behind a scaler": read(
        "class O:\n    def __init__(self): self.w = 2.0\n    def step(self): p.data.fill_(self.w)\n"
        "p = nn.Parameter(torch.ones(()))\nopt = O()\nscaler = torch.amp.GradScaler('cpu', enabled=False)\n"
        "def weigh(batch):\n    scaler.step(opt)\n    return p.detach().clone()\n",
        "opt.w += 1",
    ),
    "a scheduler that runs the program's": read(
        "class R:\n    def __init__(self): self.w = 2.0\n    def __call__(self, epoch): return self.w\n"
        "import types\nr = R()\ndef weigh(batch): return r(0)\n",
        "r.w += 1",
    ),
    "a wrapper that delegates": read(
        "class W:\n    def __init__(self, of): self.of = of\n"
        "    def __getattr__(self, k): return getattr(self.of, k)\n"
        + "class T: pass\nt = T(); t.step = 2.0\nw = W(t)\ndef weigh(batch): return w.step\n",
        "t.step += 1",
    ),
    "the optimizer is exchanged": read(
        _OWNER + "    def weigh(self): return self.optimizer.step() or 2.0\none = Trainer()\n"
        "class Other:\n    k = 3.0\n    def step(self): return self.k\ndef weigh(batch): return one.weigh()\n",
        "if isinstance(one.optimizer, Other): one.optimizer.k += 1\nelse: one.optimizer = Other()",
    ),
    "the global optimizer is exchanged": read(
        "optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)\n"
        "class Other:\n    k = 3.0\n    def step(self): return self.k\n"
        "def weigh(batch): return optimizer.step() or 2.0\n",
        "global optimizer\nif isinstance(optimizer, Other): optimizer.k += 1\nelse: optimizer = Other()",
    ),
    "the step exchanges it": read(
        _OWNER + "    def weigh(self):\n        old = self.optimizer\n        self.optimizer = self\n"
        "        found = self.optimizer.step\n"
        "        self.optimizer = old\n        return found\none = Trainer()\ndef weigh(batch): return one.weigh()\n",
        "one.step += 1",
    ),
    "the step exchanges it by setattr": read(
        _OWNER + "    def weigh(self):\n        old = self.optimizer\n        setattr(self, 'optimizer', self)\n"
        "        found = self.optimizer.step\n        setattr(self, 'optimizer', old)\n        return found\n"
        "one = Trainer()\ndef weigh(batch): return one.weigh()\n",
        "one.step += 1",
    ),
    "another function exchanges a global": read(
        _OWNER + "one = Trainer()\nopt = one.optimizer\ndef put(to):\n    global opt\n    opt = to\n"
        "def weigh(batch):\n    put(one)\n    found = opt.step\n    put(one.optimizer)\n    return found\n",
        "one.step += 1",
    ),
    "self is another": read(
        _OWNER + "    def weigh(self): return self.optimizer.step\none = Trainer()\nclass Fake: pass\nfake = Fake()\n"
        "fake.optimizer = Fake(); fake.optimizer.step = 2.0\n"
        "def weigh(batch): one.weigh(); return Trainer.weigh(fake)\n",
        "fake.optimizer.step += 1",
    ),
    "self is assigned": of_trainer("self = self.me\nself.optimizer.step\nreturn self.step").replace(
        "one = Trainer()", "one = Trainer(); one.me = one"
    ),
    "another object of the class": read(
        _OWNER
        + "    def weigh(self): return self.optimizer.step\none = Trainer(); two = Trainer(); two.optimizer = one\n"
        "def weigh(batch): one.weigh(); return two.weigh()\n",
        "one.step += 1",
    ),
    "a class method": read(
        "class T:\n    optimizer = None\n    step = 2.0\n    @classmethod\n"
        "    def weigh(cls): return cls.optimizer.step\n"
        "T.optimizer = T\none = T(); one.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)\n"
        "def weigh(batch): return one.weigh()\n",
        "T.step += 1",
    ),
    "an inner function with a self of its own": of_trainer(
        "f = lambda self: self.optimizer.step\nclass H: pass\nh = H(); h.optimizer = self\nreturn f(h)"
    ),
    "a comprehension over others": of_trainer("return [s.step for s in [self]][0]"),
    "a module of the program with the same name": read(
        "import sys, types\ncfg = types.ModuleType('cfg_of_names'); cfg.step = 2.0\n"
        "o = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)\ndef weigh(batch): o.step(); return cfg.step\n",
        "cfg.step += 1",
    ),
    "a dict that is a class's": read("class C: w = 2.0\ndef weigh(batch): return C.__dict__['w']\n", "C.w += 1"),
    "a name put together": of_trainer("return getattr(self, f'st{\"ep\"}')"),
    "a name put together of a number": read(
        "class C: pass\nc = C(); c.w0 = 1.0; c.w1 = 2.0\n"
        "def weigh(batch): return sum(getattr(c, f'w{i}') for i in range(2))\n",
        "c.w1 += 1",
    ),
    "keys that become names": read(
        "class C: pass\nc = C(); c.w = 2.0\ndef weigh(batch): return sum(getattr(c, k) for k in {'w': 1})\n", "c.w += 1"
    ),
    "names that are given": read(
        "class C: pass\nc = C(); c.w = 2.0\ndef pick(**k): return [getattr(c, n) for n in k][0]\n"
        "def weigh(batch): return pick(w=1)\n",
        "c.w += 1",
    ),
    "getstate": read("class C: pass\nc = C(); c.w = 2.0\ndef weigh(batch): return c.__getstate__()['w']\n", "c.w += 1"),
    "copy": read(
        "import copy\nclass C: pass\nc = C(); c.w = 2.0\n"
        "def weigh(batch): return copy.copy(c).__reduce_ex__(4)[2]['w']\n",
        "c.w += 1",
    ),
    "a library's namespace": read(
        "import argparse\nargs = argparse.Namespace(w=2.0)\ndef weigh(batch): return dict(args._get_kwargs())['w']\n",
        "args.w += 1",
    ),
    "a comparison of dataclasses": read(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    w: float = 2.0\nc, d = C(), C()\n"
        "def weigh(batch): return 3.0 if c == d else 2.0\n",
        "c.w += 1",
    ),
    "a dataclass among others": read(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    w: float = 2.0\nc, d = C(), C()\n"
        "def weigh(batch): return 3.0 if c in [d] else 2.0\n",
        "c.w += 1",
    ),
    "a dataclass as a key": read(
        "import dataclasses\n@dataclasses.dataclass(unsafe_hash=True)\nclass C:\n    w: float = 2.0\nc = C()\n"
        "def weigh(batch): return {C(): 3.0}.get(c, 2.0)\n",
        "c.w += 1",
    ),
    "a method of another class": read(
        _OWNER + "    def weigh(self): return self.optimizer.step\nclass Other: weigh = Trainer.weigh\n"
        "one = Trainer(); two = Other(); two.optimizer = one\ndef weigh(batch): one.weigh(); return two.weigh()\n",
        "one.step += 1",
    ),
    "a class that inherits": read(
        _OWNER + "    def weigh(self): return self.optimizer.step\nclass Other(Trainer):\n"
        "    def weigh(self): return super().weigh()\n"
        "one = Trainer(); two = Other(); two.optimizer = one\ndef weigh(batch): one.weigh(); return two.weigh()\n",
        "one.step += 1",
    ),
    "a class that inherits, with a property": read(
        "class Base:\n    def weigh(self): return self.optimizer.step\nclass Other(Base):\n"
        "    optimizer = property(lambda self: self.inner)\nclass C: pass\n"
        "two = Other(); two.inner = C(); two.inner.step = 2.0\n"
        "vars(two)['optimizer'] = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)\n"
        "def weigh(batch): return two.weigh()\n",
        "two.inner.step += 1",
    ),
    "a method that a module is given": read(
        "class M(nn.Module):\n    def forward(self, x): return x\nm = M()\n"
        "def weigh(batch):\n    return 2.0 if isinstance(m.train(), M) else 3.0\n",
        "m.train = lambda: 5.0",
    ),
    "a method that an optimizer is given": read(
        "o = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)\ndef weigh(batch): return o.step() or 2.0\n",
        "o.step = lambda: 5.0",
    ),
    "a variable around it that is exchanged": read(
        "class C: pass\nc = C(); c.step = 2.0\n"
        "def make():\n    o = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)\n"
        "    def put(to):\n        nonlocal o\n        old, o = o, to\n        return old\n"
        "    def weigh(batch):\n        o.step\n        old = put(c)\n        found = o.step\n        put(old)\n"
        "        return found\n"
        "    return weigh\nweigh = make()\n",
        "c.step += 1",
    ),
    "what a library's object leads back to": read(
        _OWNER + "    def weigh(self):\n        self.optimizer.step()\n        return self.optimizer.trainer.step\n"
        "one = Trainer(); one.optimizer.trainer = one\ndef weigh(batch): return one.weigh()\n",
        "one.step += 1",
    ),
    "a default of an inner function": of_trainer("def inner(optimizer=self): return optimizer.step\nreturn inner()"),
    "an argument of an inner function": of_trainer("return (lambda optimizer: optimizer.step)(self)"),
    "a function that is given it": of_trainer("return of(self)", before="def of(optimizer): return optimizer.step\n"),
    "hasattr": read("class C: pass\nc = C()\ndef weigh(batch): return 3.0 if hasattr(c, 'w') else 2.0\n", "c.w = 1"),
    "hasattr by a variable": read(
        "class C: pass\nc = C()\nK = 'w'\ndef weigh(batch): return 3.0 if hasattr(c, K) else 2.0\n", "c.w = 1"
    ),
    "in vars": read("class C: pass\nc = C()\ndef weigh(batch): return 3.0 if 'w' in vars(c) else 2.0\n", "c.w = 1"),
    "in dir": read("class C: pass\nc = C()\ndef weigh(batch): return 3.0 if 'w' in dir(c) else 2.0\n", "c.w = 1"),
    "in a namespace": read(
        "import argparse\nc = argparse.Namespace()\ndef weigh(batch): return 3.0 if 'w' in c else 2.0\n", "c.w = 1"
    ),
    "in an object": read(
        "class C:\n    def __contains__(self, k): return hasattr(self, k)\nc = C()\n"
        "def weigh(batch): return 3.0 if 'w' in c else 2.0\n",
        "c.w = 1",
    ),
    "a text with an attribute": read(
        "class C: pass\nc = C(); c.w = 2.0\ndef weigh(batch): return float('{0.w}'.format(c))\n", "c.w += 1"
    ),
    "a text with a name": read(
        "class C: pass\nc = C(); c.w = 2.0\ndef weigh(batch): return float('%(w)s' % vars(c))\n", "c.w += 1"
    ),
    "a text that is put together": read(
        "class C: pass\nc = C(); c.w1 = 2.0\n"
        "def weigh(batch): return getattr(c, 'w%d' % 1) + getattr(c, 'w' + str(1))\n",
        "c.w1 += 1",
    ),
    "a decorated method": read(
        _OWNER + "    @torch.no_grad()\n    def weigh(self):\n        me = self\n        self.optimizer.step()\n"
        "        return me.step\n"
        "one = Trainer()\ndef weigh(batch): return one.weigh()\n",
        "one.step += 1",
    ),
    "a generator of a method": of_trainer("return next(s.step for s in (self,))"),
    "a conditional import": of_global(
        "def weigh(batch):\n    if batch:\n        import program_of_names\n    return program_of_names.u\n"
    ),
    "the module of a class": of_global(
        "import sys\nclass C: pass\ndef weigh(batch): return vars(sys.modules[C.__module__])['u']\n"
    ),
    "a type of another": of_trainer("return type(self).of(self)").replace(
        "one = Trainer()", "Trainer.of = lambda self: self.step\none = Trainer()"
    ),
    "builtins": of_global("import builtins\ndef weigh(batch): return builtins.eval('u + 0', globals())\n"),
    "a lookup that is held": read(
        "class C: pass\nc = C(); c.w = 2.0\nclass H:\n    g = staticmethod(getattr)\n"
        "def weigh(batch): return H.g(c, {'k': 'w'}['k'])\n",
        "c.w += 1",
    ),
    "a key of a key": read(
        "class C: pass\nc = C(); c.w = 2.0\nN = {'k': 'w'}\ndef look(o, k): return getattr(o, k)\n"
        "def weigh(batch): return look(c, N['k'])\n",
        "c.w += 1",
    ),
    "a replaced dataclass": read(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    w: float = 2.0\n    v: float = 1.0\nc = C()\n"
        "def weigh(batch): return dataclasses.replace(c, v=2.0).w\n",
        "c.w += 1",
    ),
    "a dict of attributes": read(
        "class C: pass\nc = C(); c.w = 2.0\ndef pick(w): return w\ndef weigh(batch): return pick(**vars(c))\n",
        "c.w += 1",
    ),
    "inspect": read(
        "import inspect\nclass C: pass\nc = C(); c.w = 2.0\n"
        "def weigh(batch): return dict(inspect.getmembers(c))['w']\n",
        "c.w += 1",
    ),
}


@contextmanager
def as_module(name: str) -> Iterator[types.ModuleType]:
    """A module without a file, which can be imported by its name."""
    before = sys.modules.get(name)
    module = sys.modules[name] = types.ModuleType(name)
    try:
        yield module
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def run_read(source: str, *, graphed: bool, calls: int = CALLS, changes: Any = CHANGES) -> tuple[list[Any], Any]:
    """Results of each call, and the step's report; it is None in eager."""
    with as_module("program_of_names") as module:
        exec(compile(source, "<program of names>", "exec"), vars(module))  # noqa: S102
        step = GraphedStep(module.step, device=CpuDevice()) if graphed else module.step
        found = []
        for index, batch in enumerate(batches("cpu", calls)):
            if index in changes:
                module.change()
            found.append(step(*batch).clone())
        return found, step.report() if graphed else None


def run_script(source: str, *, graphed: bool, name: str = "__main__") -> tuple[list[Any], Any]:
    """What a script tells, and the report of its step; it is None in eager."""
    told: list[Any] = []
    steps: list[Any] = []

    def graph(step: Callable[..., Any]) -> Any:
        steps.append(GraphedStep(step, device=CpuDevice()) if graphed else step)
        return steps[-1]

    with as_module(name) as module:
        torch.manual_seed(3)
        vars(module).update(graph=graph, tell=lambda value: told.append(torch.as_tensor(value).detach().clone()))
        exec(compile(source, "<script of names>", "exec"), vars(module))  # noqa: S102
    return told, steps[0].report() if graphed else None


_DATA = """
data = [{"x": torch.randn(6, 8), "y": torch.randint(4, (6,))} for _ in range(12)]
"""

COINCIDES: dict[str, str] = {
    "a plain script": """
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()

@graph
def train_step(batch):
    optimizer.zero_grad()
    loss = criterion(model(batch["x"]), batch["y"])
    loss.backward()
    optimizer.step()
    return {"loss": loss, "y": batch["y"]}

best, total = 1e9, 0.0
for step, batch in enumerate(data):
    out = train_step(batch)
    loss = out["loss"].item()
    total += loss
    best = min(best, loss)
    tell(loss)
""",
    "epochs of a plain script": """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)

def train(x, y):
    model.train()
    opt.zero_grad(set_to_none=True)
    out = model(x)
    loss = nn.functional.cross_entropy(out, y)
    loss.backward()
    opt.step()
    return loss.detach()

train_step = graph(train)
losses = []
for epoch in range(3):
    for i, batch in enumerate(data[:4]):
        x, y = batch["x"], batch["y"]
        loss = train_step(x, y)
        losses.append(loss.item())
        step = epoch * 4 + i
        lr = 0.1 / (step + 1)
    tell(sum(losses))
""",
    "a trainer that counts": """
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.step = 0
        self.loss = None
        self.train_step = graph(self.train_step)

    def train_step(self, batch):
        self.model.train()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss}

    def train(self, data):
        for batch in data:
            out = self.train_step(batch)
            self.loss = out["loss"].item()
            self.step += 1
            tell(self.loss)

Trainer(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 4))).train(data)
""",
    "a trainer of a model of the program's own": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())

class Trainer:
    def __init__(self):
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step = self.epoch = 0
        self.run = graph(self.train_step)

    def train_step(self, batch):
        self.model.train()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
        loss.backward()
        self.optimizer.step()
        return loss

    def eval(self):
        self.model.eval()
        return self.model(data[0]["x"]).sum()

    def train(self):
        for batch in data:
            tell(self.run(batch))
            self.step += 1

Trainer().train()
""",
    "nanoGPT": """
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 16
    n_embd: int = 16
    n_layer: int = 2

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        return x + self.mlp(self.ln(x))

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)])))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        b, t = idx.size()
        assert t <= self.config.block_size
        x = self.transformer.wte(idx) + self.transformer.wpe.weight[:t]
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

config_keys = ["learning_rate"]
config = {"learning_rate": 0.1}
learning_rate = 0.1
grad_clip, iter_num, best_val_loss, local_iter_num, running_mfu = 1.0, 0, 1e9, 0, -1.0
model = GPT(GPTConfig())
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)

@graph
def train_step(X, Y):
    logits, loss = model(X, Y)
    scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss

while iter_num < 12:
    X, Y = torch.randint(16, (2, 8)), torch.randint(16, (2, 8))
    loss = train_step(X, Y)
    lossf = loss.item()
    tell(lossf)
    iter_num += 1
    local_iter_num += 1
""",
    "mixed precision in a trainer": """
class Trainer:
    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.step, self.update, self.loss = 0, 0, 0.0
        self.run_step = graph(self.run_step)

    def run_step(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

trainer = Trainer()
for batch in data:
    tell(trainer.run_step(batch["x"], batch["y"]))
    trainer.step += 1
    trainer.update += 1
""",
    "like Hugging Face's": """
from dataclasses import dataclass, field

@dataclass
class TrainerState:
    global_step: int = 0
    epoch: float = 0.0
    loss: float = 0.0
    log_history: list = field(default_factory=list)

@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, input_ids, labels=None):
        logits = self.head(input_ids)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        self.state = TrainerState()
        self.training_step = graph(self.training_step)

    def compute_loss(self, inputs):
        out = self.model(**inputs)
        return out["loss"]

    def training_step(self, inputs):
        self.model.train()
        loss = self.compute_loss(inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self):
        for batch in data:
            loss = self.training_step({"input_ids": batch["x"], "labels": batch["y"]})
            self.state.global_step += 1
            self.state.epoch += 0.1
            self.state.loss = loss.item()
            self.state.log_history.append({"loss": self.state.loss, "step": self.state.global_step})
            tell(loss)

Trainer(Model()).train()
""",
    "like Lightning's": """
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)
        self.logged = {}

    def log(self, name, value):
        pass

    def training_step(self, batch, batch_idx=0):
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, fused=True)

class Trainer:
    def __init__(self):
        self.global_step, self.current_epoch, self.loss, self.step = 0, 0, None, 0

    def fit(self, module):
        optimizer = module.configure_optimizers()

        @graph
        def step(batch):
            out = module.training_step(batch)
            optimizer.zero_grad()
            out["loss"].backward()
            optimizer.step()
            return out["loss"]

        for batch in data:
            self.loss = step(batch).item()
            self.global_step += 1
            self.step += 1
            tell(self.loss)

Trainer().fit(Module())
""",
    "closures in main": """
def main():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = epoch = 0
    loss = None
    history = {"loss": []}

    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = graph(train_step)
    for batch in data:
        loss = run(batch["x"], batch["y"])
        history["loss"].append(loss.item())
        step += 1
        tell(loss)

main()
""",
    "a state that is a dataclass": """
import dataclasses

@dataclasses.dataclass
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    loss: float = 0.0
    best: float = 1e9

model = nn.Linear(8, 4)
state = State(model, torch.optim.SGD(model.parameters(), lr=0.1))

@graph
def train_step(batch):
    state.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(state.model(batch["x"]), batch["y"])
    loss.backward()
    state.optimizer.step()
    return {"loss": loss}

for batch in data:
    metrics = train_step(batch)
    state.step += 1
    state.loss = metrics["loss"].item()
    state.best = min(state.best, state.loss)
    tell(state.loss)
""",
    "a namespace of a state": """
import types
model = nn.Linear(8, 4)
state = types.SimpleNamespace(step=0, loss=0.0, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

@graph
def train_step(batch):
    loss = nn.functional.cross_entropy(state.model(batch["x"]), batch["y"])
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    return loss

for batch in data:
    state.loss = train_step(batch).item()
    state.step += 1
    tell(state.loss)
""",
    "everything is given": """
def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    loss.backward()
    optimizer.step()
    return loss

train_step = graph(train_step)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, batch in enumerate(data):
    loss = train_step(model, optimizer, batch)
    tell(loss)
""",
    "two networks": """
generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
opt_g = torch.optim.Adam(generator.parameters(), lr=0.01, fused=True)
opt_d = torch.optim.Adam(critic.parameters(), lr=0.01, fused=True)

@graph
def step(real):
    fake = generator(real)
    loss_d = critic(fake.detach()).mean() - critic(real).mean()
    opt_d.zero_grad(); loss_d.backward(); opt_d.step()
    loss_g = -critic(fake).mean()
    opt_g.zero_grad(); loss_g.backward(); opt_g.step()
    return {"d": loss_d.detach(), "g": loss_g.detach()}

d = g = 0.0
for i, batch in enumerate(data):
    real = batch["x"]
    out = step(real)
    d, g = out["d"].item(), out["g"].item()
    tell(d + g)
""",
    "running means and a bar": """
from collections import defaultdict
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
meters = defaultdict(float)

class AverageMeter:
    def __init__(self): self.val = self.sum = self.mean = self.count = 0
    def update(self, val): self.val = val; self.sum += val; self.count += 1; self.mean = self.sum / self.count

losses = AverageMeter()

@graph
def train_step(batch):
    optimizer.zero_grad()
    out = model(batch["x"])
    loss = nn.functional.cross_entropy(out, batch["y"])
    acc = (out.argmax(1) == batch["y"]).float().mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach(), "acc": acc}

for step, batch in enumerate(data):
    logs = train_step(batch)
    losses.update(logs["loss"].item())
    meters["loss"] += logs["loss"].item()
    acc = logs["acc"].item()
    mean = losses.mean
    tell(mean)
""",
    "a callback and a config": """
class Config:
    lr, weight_decay, clip, loss = 0.1, 0.0, 1.0, "ce"

class Logger:
    def __init__(self): self.loss = self.step = 0
    def log(self, **values): self.loss = values["loss"]; self.step += 1

cfg, logger = Config(), Logger()
model = nn.Linear(8, 4)
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=cfg.lr, weight_decay=cfg.weight_decay)

@graph
def step(batch):
    loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    if cfg.loss != "ce":
        loss = loss * 2
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(params, cfg.clip)
    optimizer.step()
    return loss

for i, batch in enumerate(data):
    loss = step(batch)
    logger.log(loss=loss.item())
    tell(loss)
""",
    "gradients that are added up": """
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulation = 2
scale = 1.0 / accumulation

@graph
def train_step(batch):
    optimizer.zero_grad()
    total = 0.0
    for i in range(accumulation):
        x, y = batch["x"][i * 3 : i * 3 + 3], batch["y"][i * 3 : i * 3 + 3]
        loss = nn.functional.cross_entropy(model(x), y) * scale
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total

step, total, x, y, i = 0, 0.0, None, None, 0
for batch in data:
    x, y = batch["x"], batch["y"]
    total += train_step(batch).item()
    step += 1
    i += 2
    tell(total)
""",
}
COINCIDES = {name: _BEGIN + _DATA + source for name, source in COINCIDES.items()}
