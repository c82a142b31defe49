{{/* Labels of every object of this chart. */}}
{{- define "prfaas-member.labels" -}}
app.kubernetes.io/name: prfaas-member
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: prfaas
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Namespace of the pools. */}}
{{- define "prfaas-member.namespace" -}}
{{ .Values.namespace.name | default .Release.Namespace }}
{{- end }}

{{- /* Whether this release has the admission policy. Values that an earlier version kept (--reuse-values) have no `admission`. */ -}}
{{- define "prfaas-member.admits" -}}
{{- if and (.Values.admission).enabled (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version) }}yes{{ end }}
{{- end }}
