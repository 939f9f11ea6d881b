"""Reports: tables, figures and a page from recorded results. Others use `suite.report.build.build_report`."""
