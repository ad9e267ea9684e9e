//! Hostile chat templates: endless loops, bombs of memory and output, and ways out that are none.

use super::{
    Case, Class,
    Expect::{self, Either, Odd, Refused},
};

fn raw(
    name: impl Into<String>,
    expect: Expect,
    make: impl Fn() -> Vec<u8> + Send + Sync + 'static,
) -> Case {
    Case::folder(Class::Template, name, expect, move |folder| {
        folder.put("chat_template.jinja", make())
    })
}

fn text(name: &str, expect: Expect, text: impl Into<String>) -> Case {
    let text = text.into();
    raw(name, expect, move || text.clone().into_bytes())
}

const FAILS: Expect = Odd("template_fails");
const UNREADABLE: Expect = Odd("template_unreadable");

fn loops() -> Vec<Case> {
    vec![
        text(
            "a loop over 10^10",
            FAILS,
            "{% for a in range(10000000000) %}{{ a }}{% endfor %}",
        ),
        text(
            "a loop over 10^18",
            FAILS,
            "{% for a in range(1000000000000000000) %}{% endfor %}",
        ),
        text(
            "a loop over -1",
            Either("it is empty"),
            "{% for a in range(-1) %}{% endfor %}x",
        ),
        text(
            "a range of steps of 0",
            FAILS,
            "{% for a in range(0, 10, 0) %}x{% endfor %}",
        ),
        text(
            "loops inside loops",
            FAILS,
            format!(
                "{}x{}",
                "{% for a in range(100) %}".repeat(20),
                "{% endfor %}".repeat(20)
            ),
        ),
        text(
            "loops 500 deep",
            Either("depth is bounded"),
            format!(
                "{}x{}",
                "{% for a in [1] %}".repeat(500),
                "{% endfor %}".repeat(500)
            ),
        ),
        text(
            "ifs 100000 deep",
            Either("depth is bounded"),
            format!("{}x", "{% if true %}".repeat(20_000)),
        ),
        text(
            "10000 elifs",
            UNREADABLE,
            format!(
                "{{% if false %}}{}{{% endif %}}",
                "{% elif false %}x".repeat(10_000)
            ),
        ),
        text(
            "a macro that calls itself",
            FAILS,
            "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
        ),
        text(
            "a macro that calls itself twice",
            FAILS,
            "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(0) }}",
        ),
        text(
            "two macros that call each other",
            FAILS,
            "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
        ),
        text(
            "a macro that is called with itself",
            FAILS,
            "{% macro f(g) %}{{ g(g) }}{% endmacro %}{{ f(f) }}",
        ),
        text(
            "a loop that recurses",
            FAILS,
            "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        ),
        text(
            "a block that is itself",
            Either("blocks are names"),
            "{% block a %}{{ self.a() }}{% endblock %}",
        ),
        text(
            "a caller that calls its caller",
            Either("depth is bounded"),
            "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{% call f() %}x{% endcall %}{% endcall %}",
        ),
        text(
            "a filter in a filter in a filter",
            Either("chains are bounded"),
            format!("{{{{ 'x'{} }}}}", "|upper".repeat(2000)),
        ),
        text(
            "5000 brackets",
            Either("depth is bounded"),
            format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000)),
        ),
        text(
            "5000 lists inside each other",
            Either("depth is bounded"),
            format!("{{{{ {}1{} }}}}", "[".repeat(5000), "]".repeat(5000)),
        ),
        text(
            "5000 nots",
            Either("depth is bounded"),
            format!("{{{{ {}true }}}}", "not ".repeat(5000)),
        ),
        text(
            "5000 minuses",
            Either("depth is bounded"),
            format!("{{{{ {}1 }}}}", "-".repeat(5000)),
        ),
        text(
            "20000 additions",
            Either("operators are bounded"),
            format!("{{{{ 1{} }}}}", "+1".repeat(20_000)),
        ),
        text(
            "20000 attributes",
            Either("chains are bounded"),
            format!("{{{{ messages{} }}}}", ".a".repeat(20_000)),
        ),
        text(
            "20000 conditions",
            Either("chains are bounded"),
            format!("{{{{ 1{} }}}}", " if 1 else 1".repeat(10_000)),
        ),
        text(
            "20000 indices",
            Either("chains are bounded"),
            format!("{{{{ messages{} }}}}", "[0]".repeat(20_000)),
        ),
    ]
}

fn bombs() -> Vec<Case> {
    vec![
        text(
            "a text doubled 60 times",
            FAILS,
            format!(
                "{{% set x = 'ab' %}}{}{{{{ x }}}}",
                "{% set x = x + x %}".repeat(60)
            ),
        ),
        text(
            "a text doubled in one expression",
            FAILS,
            format!(
                "{{% set x = 'a' * 65536 %}}{{{{ {} }}}}",
                vec!["x"; 100].join(" ~ ")
            ),
        ),
        text("a text times 10^12", FAILS, "{{ 'a' * 1000000000000 }}"),
        text(
            "a text times 2^63",
            FAILS,
            "{{ 'a' * 9223372036854775807 }}",
        ),
        text(
            "a list times 10^12",
            FAILS,
            "{{ ([1] * 1000000000000)|length }}",
        ),
        text(
            "a list doubled 60 times",
            FAILS,
            format!(
                "{{% set x = [1] %}}{}{{{{ x|length }}}}",
                "{% set x = x + x %}".repeat(60)
            ),
        ),
        text(
            "a list of itself, 60 times",
            FAILS,
            format!(
                "{{% set x = [1] %}}{}{{{{ x }}}}",
                "{% set x = [x, x] %}".repeat(60)
            ),
        ),
        text(
            "a namespace that holds itself",
            FAILS,
            "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
        ),
        text(
            "a namespace that holds a list of itself",
            FAILS,
            "{% set n = namespace() %}{% set n.a = [n] %}{{ n.a }}",
        ),
        text(
            "a namespace that doubles",
            FAILS,
            "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        ),
        text(
            "replacements that double",
            FAILS,
            format!(
                "{{% set x = 'a' %}}{}{{{{ x }}}}",
                "{% set x = x|replace('a', 'aa') %}".repeat(60)
            ),
        ),
        text(
            "a replacement of nothing by much",
            FAILS,
            "{% set x = 'a' * 10000 %}{{ x|replace('', x) }}",
        ),
        text(
            "a join of much by much",
            FAILS,
            "{% set x = 'a' * 10000 %}{{ range(10000)|join(x) }}",
        ),
        text(
            "an indent of 10^9",
            FAILS,
            "{{ ('a\n' * 1000)|indent(1000000000) }}",
        ),
        text(
            "a format of 10^9 columns",
            Either("it may not be understood"),
            "{{ '%1000000000d'|format(1) }}",
        ),
        text(
            "a format of 10^9 places",
            Either("it may not be understood"),
            "{{ '%.1000000000f' % 1 }}",
        ),
        text(
            "a list of 10^9 characters",
            FAILS,
            "{{ range(1000000000)|list|length }}",
        ),
        text(
            "a sort of much",
            Either("it is charged"),
            "{{ range(100000)|sort(reverse=true)|first }}",
        ),
        text(
            "batches of 10^9",
            FAILS,
            "{{ [1]|batch(1000000000, 'x')|list|length }}",
        ),
        text(
            "slices of 10^9",
            Either("it is charged"),
            "{{ [1]|slice(1000000000)|list|length }}",
        ),
        text(
            "a number of many digits",
            Either("numbers are bounded"),
            "{{ 10 ** 100000 }}",
        ),
        text(
            "a number to a power to a power",
            Either("numbers are bounded"),
            "{{ 9 ** 9 ** 9 ** 9 }}",
        ),
        text(
            "a shift that is a power of 2^63",
            Either("numbers are bounded"),
            "{{ 2 ** 9223372036854775807 }}",
        ),
        text(
            "a division by zero",
            Either("it is an error, or infinity"),
            "{{ 1 / 0 }}{{ 1 // 0 }}{{ 1 % 0 }}",
        ),
        text(
            "the least number by -1",
            Either("numbers are bounded"),
            "{{ (-9223372036854775807 - 1) // -1 }}{{ (-9223372036854775807 - 1) % -1 }}",
        ),
        text(
            "a slice with absurd ends",
            Either("ends are clamped"),
            "{{ 'abc'[-9223372036854775807:9223372036854775807:9223372036854775807] }}",
        ),
        text(
            "a slice of steps of 0",
            Either("it is an error"),
            "{{ 'abc'[::0] }}",
        ),
        text(
            "a megabyte of output",
            Either("the output's bound is about that"),
            "{{ 'a' * 1000000 }}",
        ),
        text(
            "two megabytes of output",
            FAILS,
            "{{ 'a' * 1000000 }}{{ 'a' * 1000000 }}",
        ),
        text(
            "much output of plain text in a loop",
            FAILS,
            format!(
                "{{% for a in range(20000) %}}{}{{% endfor %}}",
                "x".repeat(100_000)
            ),
        ),
        text(
            "much white space",
            Either("runs of it are bounded"),
            "{{ ' ' * 600000 }}",
        ),
        text(
            "70 KB of one word",
            Odd("template_output"),
            "{{ 'a' * 70000 }}",
        ),
        text(
            "a tojson of everything, again and again",
            FAILS,
            "{% set n = namespace(x=messages) %}{% for i in range(60) %}{% set n.x = [n.x, n.x|tojson] %}{% endfor %}{{ n.x }}",
        ),
        text(
            "an escape of an escape of an escape",
            Either("what is escaped is not escaped again"),
            format!("{{{{ ('<' * 1000){} }}}}", "|escape|string".repeat(60)),
        ),
        text(
            "groups of groups",
            Either("it is charged"),
            "{{ range(1000)|map('string')|groupby(0)|list }}",
        ),
        text(
            "an urlize of much",
            Either("it may not be known"),
            "{{ ('http://a ' * 10000)|urlize }}",
        ),
        text(
            "a regular expression in a filter",
            Either("there are none"),
            "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaa!'|regex_replace('(a+)+$', 'b') }}",
        ),
        text(
            "a wordwrap of much",
            Either("it may not be known"),
            "{{ ('a ' * 100000)|wordwrap(1) }}",
        ),
        text(
            "a center of 10^9",
            Either("it may not be known"),
            "{{ 'a'|center(1000000000) }}",
        ),
        text(
            "a ljust of 10^9",
            Either("it may not be known"),
            "{{ 'a'.ljust(1000000000) }}",
        ),
        text(
            "a split of much",
            Either("it is charged"),
            "{{ ('a,' * 100000).split(',')|length }}",
        ),
        text(
            "strftime with 100000 fields",
            Either("it is charged"),
            format!("{{{{ strftime_now('{}') }}}}", "%c".repeat(20_000)),
        ),
    ]
}

fn ways_out() -> Vec<Case> {
    let mut all = vec![
        text("an include", UNREADABLE, "{% include '/etc/passwd' %}"),
        text(
            "an import",
            UNREADABLE,
            "{% import '/etc/passwd' as x %}{{ x }}",
        ),
        text("a base", UNREADABLE, "{% extends '/etc/passwd' %}"),
        text("an include of itself", UNREADABLE, "{% include 'chat' %}"),
        text(
            "an include with a computed name",
            UNREADABLE,
            "{% include ['/etc', 'passwd']|join('/') %}",
        ),
        text(
            "an import in one line",
            UNREADABLE,
            "{% from 'chat' import x %}",
        ),
        text(
            "a call of raise_exception with much",
            FAILS,
            "{{ raise_exception('x' * 1000000) }}",
        ),
        text(
            "a message that steers a terminal",
            FAILS,
            "{{ raise_exception('\x1b[2J\x1b]0;gotcha\x07') }}",
        ),
        text(
            "a message of several lines",
            FAILS,
            "{{ raise_exception('one\ntwo\r\nINFO a lie in the log') }}",
        ),
        text(
            "a do",
            Either("it may not be understood"),
            "{% do messages.append(1) %}",
        ),
        text("a debug", Either("it may be understood"), "{% debug %}"),
        text(
            "a call of debug",
            Either("it may be understood"),
            "{{ debug() }}",
        ),
        text(
            "its own template engine",
            Either("names are unknown"),
            "{{ self._TemplateReference__context }}",
        ),
    ];
    for path in [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__init__.__globals__",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "lipsum.__globals__['os'].system('id')",
        "request.application.__globals__.__builtins__.__import__('os')",
        "config.items()",
        "namespace.__init__",
        "range.__call__.__self__",
        "messages|attr('__class__')",
        "open('/etc/passwd').read()",
        "env['PATH']",
        "get_flashed_messages.__globals__",
    ] {
        all.push(text(
            &format!("a way out by {path}"),
            Either("there is nothing there"),
            format!("{{{{ {path} }}}}"),
        ));
    }
    all
}

fn texts() -> Vec<Case> {
    vec![
        text("it is empty", Either("it says nothing"), ""),
        text("a tag that does not close", UNREADABLE, "{{ messages"),
        text(
            "a comment that does not close",
            Either("it is understood or not"),
            "{# for ever",
        ),
        text("a text that does not close", UNREADABLE, "{{ 'for ever }}"),
        text(
            "a block that does not close",
            UNREADABLE,
            "{% for a in messages %}",
        ),
        text("an end without a beginning", UNREADABLE, "{% endfor %}"),
        text(
            "a statement that does not exist",
            UNREADABLE,
            "{% exec 'id' %}",
        ),
        text(
            "a filter that does not exist",
            Either("it is found out when it runs"),
            "{{ messages|exec }}",
        ),
        text("a function that does not exist", FAILS, "{{ exec('id') }}"),
        text(
            "raw that does not close",
            Either("it is understood or not"),
            "{% raw %}{{ x }}",
        ),
        text(
            "a charge of its own",
            Either("it is charged all the same"),
            "{{ messages|__charge }}{{ __charge }}",
        ),
        text(
            "a name of 100 KB",
            Either("a name is a name"),
            format!("{{{{ {} }}}}", "a".repeat(100_000)),
        ),
        text(
            "a number of 100 KB",
            Either("numbers are bounded"),
            format!("{{{{ {} }}}}", "9".repeat(100_000)),
        ),
        text(
            "100000 tags",
            Either("its bytes are bounded"),
            "{{1}}".repeat(50_000),
        ),
        text(
            "100000 comments",
            Either("its bytes are bounded"),
            "{##}".repeat(60_000),
        ),
        text(
            "50000 variables",
            Either("its bytes are bounded"),
            (0..12_000)
                .map(|n| format!("{{% set a{n}=1 %}}"))
                .collect::<String>(),
        ),
        text("250 KiB of brackets", UNREADABLE, "{{".repeat(125 << 10)),
        text("more than 256 KiB", UNREADABLE, "x".repeat((256 << 10) + 1)),
        text("more than a megabyte", Refused, "x".repeat((1 << 20) + 1)),
        raw("it is not UTF-8", Refused, || b"{{ '\xff\xfe' }}".to_vec()),
        raw("it holds zeros", Either("they are characters"), || {
            b"\0\0{{ '\0' }}\0".to_vec()
        }),
        raw(
            "it writes special tokens of the model",
            Either("templates do"),
            || b"{{ '<|bos|>' * 100000 }}".to_vec(),
        ),
        raw(
            "it writes characters that decompose",
            Either("they are characters"),
            || "{{ '\u{fdfa}' * 10000 }}".as_bytes().to_vec(),
        ),
        raw(
            "it writes marks without end",
            Either("they are characters"),
            || format!("{{{{ 'a' ~ '\u{301}' * {} }}}}", 100_000).into_bytes(),
        ),
    ]
}

/// Folders of all these kinds.
pub fn cases() -> Vec<Case> {
    let parts = [loops(), bombs(), ways_out(), texts()];
    parts.into_iter().flatten().collect()
}
